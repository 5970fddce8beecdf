"""Methods of `MegatronWrap` for Hugging Face folders: start from one, compare the model with it, write one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.errors import CheckpointError
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import Self

    from megatron_wrap.bridge.family import Family
    from megatron_wrap.bridge.rollout_weights import RolloutWeights
    from megatron_wrap.bridge.stream import WeightStream
    from megatron_wrap.config import RunConfig
    from megatron_wrap.config.schema import ArchConfig
    from megatron_wrap.engine.state import TrainingState


class HuggingFaceVerbs:
    """Mixin of `MegatronWrap`, which defines the attributes declared here."""

    config: RunConfig
    tokenizer: Any

    if TYPE_CHECKING:

        def __init__(self, config: Any, overrides: Sequence[str] = ()) -> None: ...

        def _ready(self) -> TrainingState: ...

    @classmethod
    def from_pretrained(
        cls,
        hf_path: str | os.PathLike[str],
        config: str | os.PathLike[str],
        overrides: Sequence[str] = (),
    ) -> Self:
        """The run of `config`, started from a Hugging Face folder or hub id: its architecture, weights and tokenizer.

        The same as the override `megatron_wrap.model_provider.hf_path=HF_PATH`; `model.arch` may be omitted.

        Raises:
            ConfigError: the folder is invalid, or a value of the YAML contradicts its config.json; with both values.
        """
        return cls(config, [*overrides, f"megatron_wrap.model_provider.hf_path={json.dumps(os.fspath(hf_path))}"])

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        max_shard_size: str | int = "5GB",
        dtype: str | torch.dtype | None = None,
        family: str | None = None,
    ) -> Path:
        """Write a Hugging Face folder with weights, config.json, generation_config.json and tokenizer, which
        `AutoModelForCausalLM.from_pretrained` loads, of a value model `AutoModelForSequenceClassification`. Collective.

        Args:
            folder: on a file system that all ranks share.
            max_shard_size: maximum size of a weight file, in bytes or as text such as "5GB".
            dtype: "float32", "bfloat16" or "float16"; None: that of the parameters.
            family: a model_type of transformers; None: that of hf_path, else the first that can express the
                architecture.

        Raises:
            UnsupportedModel: no family can express the architecture. CheckpointError: a rank could not write.
        """
        from megatron_wrap.bridge.choose import config_json
        from megatron_wrap.bridge.export import save_pretrained

        state, hf_path = self._ready(), self.config.model_provider.hf_path
        chosen, arch = self._family_and_arch(family)
        stream = self._weight_stream(chosen, arch, dtype)
        values = config_json(chosen, arch, stream.dtype_name, hf_path)
        target = save_pretrained(stream, values, state.parallel, folder, hf_path, self.tokenizer, max_shard_size)
        logger.info_rank_0(f"Hugging Face folder of iteration {state.progress.iteration}: {target}")
        return target

    def export_weights(
        self, dtype: str | torch.dtype | None = None, family: str | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of each weight, on every rank and on its device, one at a time.

        Collective: every rank must iterate over all of them. For example to update an inference engine during training.
        """
        from megatron_wrap.bridge.export import export_weights

        chosen, arch = self._family_and_arch(family)
        yield from export_weights(self._weight_stream(chosen, arch, dtype))

    def weight_source(self, dtype: str | torch.dtype | None = None, family: str | None = None) -> RolloutWeights:
        """The weights for an engine that rolls out: their names, dtypes and shapes, and passes over the tensors, as
        `save_pretrained` would write them. Collective.

        The object stays valid in the whole run; each pass has the weights of its time. docs/weights.md has the adapters
        for vLLM and SGLang.

        Args:
            dtype: as for `save_pretrained`.
            family: as for `save_pretrained`.

        Raises:
            UnsupportedModel: no family can express the architecture.
        """
        from megatron_wrap.bridge.rollout_weights import RolloutWeights

        chosen, arch = self._family_and_arch(family)
        is_sender = self._ready().parallel.world.rank == 0
        return RolloutWeights(lambda: self._weight_stream(chosen, arch, dtype), is_sender)

    def push_to_hub(
        self,
        repo_id: str,
        folder: str | os.PathLike[str],
        private: bool | None = None,
        commit_message: str | None = None,
        **save_arguments: Any,
    ) -> str:
        """`save_pretrained` into `folder`, then upload it from global rank 0 through huggingface_hub. Collective.

        Args:
            repo_id: `org/name`; created if it does not exist, with the login of huggingface_hub.
            save_arguments: further arguments of `save_pretrained`.

        Returns:
            The commit's URL, on every rank.

        Raises:
            CheckpointError: on every rank, if the upload fails.
        """
        from megatron_wrap.bridge.export import upload

        target = self.save_pretrained(folder, **save_arguments)
        message = commit_message or f"{self.config.name}, iteration {self._ready().progress.iteration}"
        return upload(target, repo_id, private, message)

    def _family_and_arch(self, family: str | None) -> tuple[Family, ArchConfig]:
        from megatron_wrap.bridge.choose import choose_family, complete
        from megatron_wrap.bridge.value_model import family_of_model

        # vocab_size of the configuration may be null; the state has the tokenizer's
        arch = complete(self.config.arch, self.config.train.seq_length, self._ready().shape.vocab_size)
        chosen = choose_family(arch, self.config.model_provider.hf_path, family)
        return family_of_model(self.config, chosen), arch

    def _weight_stream(self, family: Family, arch: ArchConfig, dtype: str | torch.dtype | None) -> WeightStream:
        from megatron_wrap.bridge.export import weight_stream
        from megatron_wrap.engine.parameters import synchronize_parameters

        state = self._ready()
        overlapped = bool(self.config.ddp.overlap_param_gather) and state.optimizer is not None
        synchronize_parameters(state.chunks, overlapped)
        return weight_stream(state.chunks, family, arch, state.parallel, state.platform.device, dtype)

    def _refuse_unverified(self) -> None:
        from megatron_wrap.engine.verify import verify_hugging_face

        verdict = verify_hugging_face(self._ready(), self.tokenizer)
        logger.info_rank_0(verdict.table())
        if not verdict.agrees:
            raise CheckpointError(
                f"megatron_wrap.model_provider.verify_hf: the model differs from that of {verdict.folder}: "
                f"{verdict.first_difference}; nothing was trained"
            )
