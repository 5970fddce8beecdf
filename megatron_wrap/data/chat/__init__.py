"""Converts samples to token ids with a loss mask: tokenizers, chat templates, pairs, prompts."""
