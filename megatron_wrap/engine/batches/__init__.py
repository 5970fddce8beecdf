"""Splits a global batch of samples into this process's micro-batches."""
