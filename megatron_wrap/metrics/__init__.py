"""Metrics and their one reduction over micro-batches and ranks; throughput and FLOPs."""
