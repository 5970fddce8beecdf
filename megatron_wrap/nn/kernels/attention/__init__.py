"""Attention by kernels that return the logsumexp of the scores."""
