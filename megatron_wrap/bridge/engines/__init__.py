"""Sends weights to rollout engines: vLLM, SGLang."""
