"""Prepared samples and outputs of a reference model on disk."""
