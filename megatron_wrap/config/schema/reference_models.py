"""Reference and teacher models: the mappings of `megatron_wrap.models`, decoded."""

from dataclasses import dataclass

from megatron_wrap.config.reading.yaml_nodes import Node, describe
from megatron_wrap.config.schema.keys import checked_field, key
from megatron_wrap.errors import ConfigError

SOURCES = ("copy", "base", "adapter", "hf_path", "checkpoint")
"""Keys that name the weights; a mapping contains at most one of them."""


@dataclass(frozen=True, kw_only=True)
class ReferenceModelConfig:
    """A mapping of `megatron_wrap.models.reference` or `.teacher`: the origin of the model's weights, where they are
    stored, and how they follow the policy. It has one of `copy`, `base`, `adapter`, `hf_path` and `checkpoint`, which
    is optional with `precomputed`. `copy` and `base` alone mean `{copy: true}` and `{base: true}`."""

    copy: bool = False
    """The policy's weights before the first step."""
    base: bool = False
    """The policy with its adapter switched off, which needs no memory of its own; with megatron_wrap.adapter."""
    adapter: str | None = None
    """The policy with this adapter of megatron_wrap.adapter.others instead of the trained one."""
    hf_path: str | None = None
    """Hugging Face folder or hub id, also of another architecture; its tokenizer must be the run's."""
    checkpoint: str | None = None
    """Folder of a run's checkpoints (the newest is taken) or one checkpoint, also of another architecture; its
    tokenizer must be the run's."""
    precomputed: str | None = None
    """Folder of outputs that `megatron-wrap precompute` stores, computed with the model that the other keys name (by
    default copy). Training reads them and does not load the model."""
    offload: bool = False
    """Store the weights in the host's memory, and copy them to the device for each forward pass."""
    refresh_interval: int | None = key(None, at_least=1)
    """Update the weights from the policy after every N-th iteration (trl's ref_model_sync_steps), with ema_decay or
    else by a copy; the model is then part of each checkpoint. null: never, with ema_decay every iteration."""
    ema_decay: float | None = key(None, at_least=0, below=1)
    """Update to ema_decay * reference + (1 - ema_decay) * policy, averaged in fp32; 1 - trl's ref_model_mixup_alpha.
    null: no average."""

    @property
    def source(self) -> str:
        """The key that names the weights, one of `SOURCES`; copy where none is set, as with `precomputed` alone."""
        return next((name for name in SOURCES if getattr(self, name)), "copy")

    @property
    def is_policy(self) -> bool:
        """Whether it is the policy's own model with another adapter or none."""
        return self.base or self.adapter is not None

    @property
    def update_interval(self) -> int | None:
        """Iterations between updates from the policy; None: the model never changes."""
        return 1 if self.refresh_interval is None and self.ema_decay is not None else self.refresh_interval


def decode_reference_model(node: Node, path: str) -> ReferenceModelConfig | None:
    """The model that `copy`, `base` or a mapping describes; None for null.

    Raises:
        ConfigError: another value, an unknown key, a wrong type, or keys that exclude each other; the message has file,
            line and dotted path.
    """
    if node.value is None:
        return None
    if node.value in ("copy", "base"):
        return ReferenceModelConfig(copy=node.value == "copy", base=node.value == "base")
    if not isinstance(node.value, dict):
        raise ConfigError(
            f"{node.where} {path}: must be copy, base, a mapping with one of {', '.join([*SOURCES, 'precomputed'])}, "
            f"or null, not {describe(node.value)}"
        )
    values = {name: checked_field(value, ReferenceModelConfig, name, path) for name, value in node.value.items()}
    config = ReferenceModelConfig(**values)
    _check(config, node.where, path)
    return config


def _check(config: ReferenceModelConfig, where: str, path: str) -> None:
    sources = [name for name in SOURCES if getattr(config, name)]
    if len(sources) > 1:
        raise ConfigError(f"{where} {path}: {' and '.join(sources)} each name the weights; delete all but one")
    if not sources and config.precomputed is None:
        raise ConfigError(f"{where} {path}: no weights are named; set one of {', '.join(SOURCES)}, or precomputed")
    if config.precomputed is None and not config.is_policy:
        return
    without_effect = {
        "offload": config.offload,
        "refresh_interval": config.refresh_interval is not None,
        "ema_decay": config.ema_decay is not None,
    }
    excluded = [name for name, is_set in without_effect.items() if is_set]
    if excluded:
        cause = config.source if config.is_policy else "precomputed"
        raise ConfigError(
            f"{where} {path}: {excluded[0]} has no effect with {cause}, which loads no further model; delete it"
        )
