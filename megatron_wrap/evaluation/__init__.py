"""Passes without training: evaluation, outputs of samples, scores of texts, comparison with transformers."""
