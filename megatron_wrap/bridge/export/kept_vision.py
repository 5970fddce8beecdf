"""The vision encoder of the folder that a run started from, copied unchanged into exports of the trained language
model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.export.export_format import OF_THE_WEIGHTS, ExportFormat
from megatron_wrap.bridge.loading.quantized_tensors import QuantizedTensor
from megatron_wrap.bridge.loading.stored_tensors import StoredTensor
from megatron_wrap.bridge.loading.text_part import is_vision, name_beside_vision
from megatron_wrap.bridge.loading.weight_folder import WeightFolder
from megatron_wrap.errors import ConfigError
from megatron_wrap.utils.atomic_write import atomic_file

FILE = "model-vision.safetensors"
_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class KeptVision:
    """The parts of an export besides its language model."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    """Tensors of the vision encoder and its projector, by name."""
    prefix: str
    """Prefix of the names of the language model's tensors in the folder."""
    config: Mapping[str, Any]
    """The folder's config.json."""

    @classmethod
    def of(cls, hf_format: ExportFormat) -> KeptVision:
        """The vision encoder of the run's hf_path.

        Raises:
            ConfigError: it has none, or the model is exported as another family.
        """
        original = hf_format.original
        if original is None or original.with_vision is None:
            raise ConfigError("keep_vision needs a run that started from a folder with a vision encoder (hf_path)")
        if original.family.model_type != hf_format.family.model_type:
            raise ConfigError(f"keep_vision exports the {original.family.model_type} of hf_path; name no other family")
        weights = WeightFolder(original.folder, original.family, quantization=original.quantization)
        assert weights.text_prefix is not None
        tensors = {name: entry for name, entry in weights.tensors.items() if is_vision(name)}
        if any(isinstance(entry, QuantizedTensor) for entry in tensors.values()):
            raise ConfigError("keep_vision copies a vision encoder as it is stored, and this one is quantized")
        return cls(original.folder, tensors, weights.text_prefix, original.with_vision)

    def name(self, text_name: str) -> str:
        """The name that a tensor of the language model has in a model with a vision encoder."""
        return name_beside_vision(text_name, self.prefix)

    def config_json(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Content of config.json for both, from that of the language model alone."""
        kept = {key: value for key, value in self.config.items() if key not in OF_THE_WEIGHTS}
        inner = {key: value for key, value in text.items() if key not in ("architectures", "dtype")}
        return {**kept, "text_config": {**inner, "dtype": text["dtype"]}, "dtype": text["dtype"]}

    def write(self, target: Path) -> dict[str, int]:
        """Copy the tensors and the files of the processors; returns the size of each tensor in bytes."""
        from safetensors import safe_open
        from safetensors.torch import save

        values = {}
        for entry in self.tensors.values():
            with safe_open(str(entry.file), framework="pt", device="cpu") as file:
                values[entry.name] = file.get_tensor(entry.name)
        with atomic_file(target / FILE) as written:
            written.write(save(values, metadata={"format": "pt"}))
        for file_name in _PROCESSORS:
            if (self.folder / file_name).is_file():
                shutil.copyfile(self.folder / file_name, target / file_name)
        return {name: tensor.nbytes for name, tensor in values.items()}
