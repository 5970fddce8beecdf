"""Hugging Face checkpoints: `families` defines how a family's weights and configuration correspond to Megatron-Core's,
`mapping` describes where each part of a tensor is stored, `source` reads a folder, `transfer` loads it into a model,
`stream` gathers the model's weights for export, `rollout_weights` for rollout engines.

Importing this package, a family or `mapping` needs neither torch nor Megatron-Core, because reading a YAML uses them.
"""

from megatron_wrap.config.hugging_face import register_bridge

__all__ = ["register_bridge"]
