"""Checkpoints in object stores and Hugging Face repositories."""
