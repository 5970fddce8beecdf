"""Hugging Face checkpoints: `families` defines how a family's weights and configuration correspond to Megatron-Core's,
`mapping` describes where each part of a tensor is stored, `loading` reads a folder into a model, `export` gathers a
model's weights and writes a folder, `adapters` has peft's rules and folders, `engines` sends weights to rollout
engines.

Importing this package, a family or `mapping.tensors` needs neither torch nor Megatron-Core, because reading a YAML uses
them.
"""

from megatron_wrap.config.hugging_face import register_bridge

__all__ = ["register_bridge"]
