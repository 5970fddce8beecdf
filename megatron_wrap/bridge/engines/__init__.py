"""Weights to rollout engines: vLLM, SGLang."""
