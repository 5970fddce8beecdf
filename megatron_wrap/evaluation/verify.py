"""Compares a run's model with transformers: logits on real text, the output of every layer, and every weight after a
round trip. Collective over all ranks; only global rank 0 runs transformers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
import random
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.bridge.export.weight_stream import WeightStream, dtype_name
from megatron_wrap.bridge.loading.hf_path import starting_weights
from megatron_wrap.bridge.loading.weight_folder import WeightFolder
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import CheckpointError
from megatron_wrap.evaluation.scoring import sequence_logits
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.transformer_config import parameter_dtype
from megatron_wrap.parallel import zigzag
from megatron_wrap.parallel.collectives import broadcast_object, gather_objects, gather_tensors
from megatron_wrap.platform.base.machine import GPU_KERNELS, without_packages

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Model dtype -> largest absolute difference allowed, divided by the tensor's largest absolute value (at least 1)."""

_TEXTS = (json, random, statistics, textwrap, asyncio)
"""Modules of the standard library whose docstrings are the input text."""


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """One compared tensor."""

    name: str
    largest: float
    """Largest absolute difference."""
    relative: float
    """`largest` divided by the largest absolute value of transformers' tensor (at least 1)."""
    agrees: bool


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of the comparison; the same on every rank."""

    folder: str
    model_type: str
    layout: str
    dtype: str
    text: str
    """Source of the token ids."""
    tokens: int
    tolerance: float
    weights: int
    """Number of weights compared, bit for bit after conversion of the folder's dtype to the model's."""
    weight_differences: tuple[TensorDifference, ...]
    activations: tuple[TensorDifference, ...]
    """Outputs of the embedding and of each layer, and the logits, in the order of the model."""

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return self.first_difference is None

    @property
    def first_difference(self) -> str | None:
        """The first tensor that differs, in the order of the model; None if all agree."""
        if self.weight_differences:
            first = self.weight_differences[0]
            return f"weight {first.name} differs by {first.largest:.3g} after the round trip"
        for activation in self.activations:
            if not activation.agrees:
                return (
                    f"{activation.name} is the first output that differs, by {activation.largest:.3g} "
                    f"(relative to its largest value {activation.relative:.3g}; tolerance {self.tolerance:g})"
                )
        return None

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain values."""
        head = {"agrees": self.agrees, "first_difference": self.first_difference}
        return {**head, **dataclasses.asdict(self)}

    def table(self) -> str:
        """The verdict as a table for the console."""
        width = max(len(tensor.name) for tensor in (*self.activations, *self.weight_differences))
        lines = [
            f"{self.folder} ({self.model_type}) on {self.layout} in {self.dtype}, {self.tokens} tokens of {self.text}",
            f"{'output':<{width}}  {'difference':>10}  {'relative':>10}",
        ]
        for output in self.activations:
            verdict = "ok" if output.agrees else "DIFFERS"
            lines.append(f"{output.name:<{width}}  {output.largest:>10.3g}  {output.relative:>10.3g}  {verdict}")
        same = self.weights - len(self.weight_differences)
        lines.append(f"{same} of {self.weights} weights are the same after a round trip")
        lines += [
            f"{weight.name:<{width}}  {weight.largest:>10.3g}  DIFFERS" for weight in self.weight_differences[:10]
        ]
        lines.append("agrees with transformers" if self.agrees else f"DIFFERS: {self.first_difference}")
        return "\n".join(lines)


def verify_hugging_face(state: TrainingState, tokenizer: Any = None, length: int = 64) -> Verdict:
    """Compare the model of a run that starts from `hf_path` with transformers, before its first step. Collective.

    Args:
        tokenizer: tokenizes the text; None: random ids.
        length: maximum number of tokens of each of two sequences.

    Raises:
        CheckpointError: the run has no hf_path, or transformers cannot load it.
    """
    folder = _starting_folder(state.config)
    dtype = parameter_dtype(state.config)
    sequences, text = _sequences(
        state.shape.vocab_size, tokenizer, min(length, state.config.arch.max_position_embeddings or length)
    )
    with _recorded(_modules(state), functools.partial(_first_sequence, state)) as outputs:
        logits = sequence_logits(state, sequences)
    of_this_rank = {} if state.parallel.tp.rank or state.parallel.cp.rank else outputs
    ours = {name: tensor for of_rank in gather_objects(of_this_rank) for name, tensor in of_rank.items()}
    stream = WeightStream(state.chunks, folder.family, state.config.arch, state.parallel, state.platform.device, dtype)
    weight_differences = _compare_weights(stream, folder, state.parallel.world.rank)
    verdict: Verdict | str = ""
    if state.parallel.world.rank == 0:
        try:
            with without_packages(GPU_KERNELS):
                expected, expected_logits = _transformers(folder, dtype, sequences)
            pairs = [
                (name, ours[name], expected[name]) for name in sorted(ours, key=_index_in_model) if name in expected
            ]
            pairs += [
                (f"logits of sequence {number}", *both)
                for number, both in enumerate(zip(logits, expected_logits, strict=True))
            ]
            verdict = Verdict(
                folder=str(folder.folder),
                model_type=folder.family.model_type,
                layout=state.parallel.layout,
                dtype=dtype_name(dtype),
                text=text,
                tokens=sum(map(len, sequences)),
                tolerance=TOLERANCE[dtype],
                weights=len(stream.tensors),
                weight_differences=weight_differences,
                activations=tuple(_difference(name, a, b, TOLERANCE[dtype]) for name, a, b in pairs),
            )
        except Exception as error:  # transformers may raise any; the other ranks wait in the broadcast below
            verdict = f"{folder.folder}: transformers cannot run it: {type(error).__name__}: {error}"
    verdict = broadcast_object(verdict, source_rank=0)
    if isinstance(verdict, str):
        raise CheckpointError(verdict)
    return verdict


def _starting_folder(config: RunConfig) -> WeightFolder:
    folder = starting_weights(config)
    if folder is None:
        raise CheckpointError(
            "there is no model to compare with: megatron_wrap.model_provider.hf_path is null; set it to the folder"
        )
    if derived.has_value_head(config):
        raise CheckpointError(f"{derived.VALUE_PROVIDER} has no logits to compare with transformers; verify gpt_model")
    return folder


def _sequences(vocab_size: int, tokenizer: Any, length: int) -> tuple[list[list[int]], str]:
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab_size, (2, length), generator=generator)
        return ids.tolist(), "random ids (there is no tokenizer)"
    text = "\n\n".join(inspect.getdoc(module) or "" for module in _TEXTS)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    sequences = [ids[start : start + length] for start in (0, length)]
    return [sequence for sequence in sequences if sequence], "the standard library's documentation"


def _modules(state: TrainingState) -> dict[str, torch.nn.Module]:
    """The embedding and the layers of this process by name, on the first replica."""
    modules: dict[str, torch.nn.Module] = {}
    for model in map(bare_model, state.chunks if state.parallel.dp.rank == 0 else ()):
        modules |= {f"layer {layer.layer_number - 1}": layer for layer in getattr(model.decoder, "layers", ())}
        if getattr(model, "pre_process", False):
            modules["embedding"] = model.embedding
    return modules


def _first_sequence(state: TrainingState, hidden: Tensor) -> Tensor:
    """[S, hidden] of the first sequence, merged over tensor- and context-parallel ranks. Collective over them."""
    hidden, parallel = hidden[:, :1], state.parallel
    if state.transformer_config.sequence_parallel:
        hidden = torch.cat(gather_tensors(hidden, parallel.tp.group))
    return zigzag.merge(gather_tensors(hidden, parallel.cp.group), 0)[:, 0]


@contextmanager
def _recorded(
    modules: Mapping[str, torch.nn.Module], first_sequence: Callable[[Tensor], Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Record each module's output of the first forward pass within the context: name -> [S, hidden], fp32 on the CPU.

    Args:
        first_sequence: output of a module -> that of the first sequence.
    """
    outputs: dict[str, Tensor] = {}

    def record(name: str, output: Any) -> None:  # returns None: a hook's return value replaces the output
        if name not in outputs:
            hidden = output[0] if isinstance(output, tuple) else output
            outputs[name] = first_sequence(hidden.detach()).float().cpu()

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(lambda _m, _i, out, name=name: record(name, out)))
        yield outputs


def _index_in_model(name: str) -> int:
    return -1 if name == "embedding" else int(name.rpartition(" ")[2])


def _transformers(
    folder: WeightFolder, dtype: torch.dtype, sequences: Sequence[Sequence[int]]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """transformers' outputs of the embedding and the layers for the first sequence, and the logits of all sequences, on
    the CPU."""
    options = {"config": _configuration(folder), "dtype": dtype, "attn_implementation": "eager"}
    model = _model_class(folder).from_pretrained(folder.folder, trust_remote_code=False, **options).eval()
    layers = getattr(model.base_model, "layers", None) or model.base_model.h
    logits = []
    named = {f"layer {number}": layer for number, layer in enumerate(layers)}
    with torch.no_grad(), _recorded(named, lambda hidden: hidden[0]) as outputs:
        for number, ids in enumerate(sequences):
            result = model(torch.tensor([list(ids)]), output_hidden_states=number == 0, use_cache=False)
            logits.append(result.logits[0].float())
            if number == 0:
                outputs["embedding"] = result.hidden_states[0][0].float()
    return outputs, logits


def _model_class(folder: WeightFolder) -> Any:
    """transformers' class of the folder's family, which may be that of another model_type."""
    import transformers

    return getattr(transformers, folder.family.architecture, transformers.AutoModelForCausalLM)


def _configuration(folder: WeightFolder) -> Any:
    """transformers' configuration of the folder; quantized weights are dequantized, its default on the CPU alone."""
    import transformers

    if folder.text_prefix is not None:
        raise CheckpointError(
            f"{folder.folder}: the folder of a model with a vision encoder cannot be verified; export its text model "
            "(megatron-wrap export-hf), and verify that folder"
        )
    config_class = getattr(_model_class(folder), "config_class", None)
    if config_class is None:
        config = transformers.AutoConfig.from_pretrained(folder.folder)
    else:
        values, _ = config_class.get_config_dict(folder.folder)
        # transformers finds the conversion of a folder's tensors by the type, and has no kimi_k2
        config = config_class.from_dict({**values, "model_type": config_class.model_type})
    if folder.quantization is not None:
        config.quantization_config = {**config.quantization_config, "dequantize": True}
    return config


def _compare_weights(stream: WeightStream, folder: WeightFolder, rank: int) -> tuple[TensorDifference, ...]:
    """The weights that differ from the folder's after a round trip, in the order of the model; on rank 0."""
    differing = []
    for tensor in stream.tensors:
        for start, block in stream.blocks(tensor, to_rank=0):
            if rank == 0 and block is not None:
                region = ((start, start + block.shape[0]), *((0, size) for size in tensor.shape[1:]))
                folder_values = folder.read(tensor.name, region).to(block.dtype)
                if not torch.equal(folder_values, block):
                    largest = (folder_values.float() - block.float()).abs().max().item()
                    differing.append(TensorDifference(tensor.name, largest, largest, agrees=False))
    unique = {difference.name: difference for difference in reversed(differing)}
    return tuple(reversed(unique.values()))


def _difference(name: str, ours: Tensor, expected: Tensor, tolerance: float) -> TensorDifference:
    ours = ours[: expected.shape[0]].float()  # sequences are padded to the layout's divisor
    if ours.shape != expected.shape:
        return TensorDifference(
            f"{name} (shape {tuple(ours.shape)}, not {tuple(expected.shape)})", 0.0, 0.0, agrees=False
        )
    largest = (ours - expected).abs().max().item()
    relative = largest / max(1.0, expected.abs().max().item())
    return TensorDifference(name, largest, relative, agrees=relative <= tolerance)  # False for nan
