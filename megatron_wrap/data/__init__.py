"""Samples: files, their order, tokenizers, and chats to token ids with a loss mask."""
