"""Hugging Face checkpoints: `families` say how a family's weights and configuration relate to ours, `mapping` where
each part of a tensor goes, `source` reads, `transfer` fills a model, `stream` gathers it again.

Importing this, a family or `mapping` needs neither torch nor Megatron-Core: reading a run's YAML goes through families.
"""

from megatron_wrap.config.hugging_face import register_bridge

__all__ = ["register_bridge"]
