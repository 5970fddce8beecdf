"""Adapters: the keys of `megatron_wrap.adapter`, with peft's names and meanings (peft.LoraConfig)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_wrap.config.schema.keys import key


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """`megatron_wrap.adapter`: low-rank adapters (LoRA, arXiv:2106.09685) beside frozen weights; names and meanings are
    those of peft's LoraConfig, modules have their names in Hugging Face's model."""

    adapter_type: Literal["none", "lora"] = "none"
    """none: train all weights; lora: freeze them, and train two factors of low rank beside each target module."""
    path: str | None = None
    """Folder of a peft adapter (adapter_config.json, adapter_model.safetensors), whose factors are the initial ones;
    its r, alpha and target modules must be those below. null: new factors."""
    r: int = key(8, at_least=1)
    """Rank of the factors."""
    lora_alpha: float = key(8, above=0)
    """The product of the factors is multiplied by lora_alpha / r."""
    lora_dropout: float = key(0.0, at_least=0, below=1)
    """Dropout of the adapters' inputs in training; above 0, results differ between parallel layouts."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """all-linear (every linear layer of the decoder; in a mixture of experts those of attention), names or endings of
    names such as [q_proj, v_proj], or a regular expression that matches a whole name."""
    exclude_modules: str | tuple[str, ...] = ()
    """Modules of target_modules that get no adapter, in the same notation."""
    layers_to_transform: tuple[int, ...] = ()
    """Indices of the layers with adapters, from 0; []: all. Only with a list of target_modules."""
    rank_pattern: Mapping[str, int] = key({})
    """Regular expression of names of modules -> their rank instead of r."""
    alpha_pattern: Mapping[str, float] = key({})
    """Regular expression of names of modules -> their alpha instead of lora_alpha."""
    use_rslora: bool = False
    """Multiply by lora_alpha / sqrt(r) (rank-stabilized LoRA, arXiv:2312.03732)."""
    init_lora_weights: bool | Literal["gaussian"] = True
    """true: A uniform within 1 / sqrt(inputs), B zero; gaussian: A normal with deviation 1 / r, B zero; false: B as A,
    so that an adapter is active from the beginning, for tests."""
    loraplus_lr_ratio: float | None = key(None, above=0)
    """Learning rate of B over that of A (LoRA+, arXiv:2402.12354); null: equal."""
    keep_base: bool = False
    """Save the frozen weights with each checkpoint; false: only the adapter, if the frozen weights are those of
    model_provider.hf_path."""
