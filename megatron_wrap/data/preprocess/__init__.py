"""Converts files of text to indexed data, and trains tokenizers."""
