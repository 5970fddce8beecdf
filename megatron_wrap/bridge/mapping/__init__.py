"""Correspondence of a family's configuration and tensors to Megatron-Core's."""
