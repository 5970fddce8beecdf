"""Data files, sample order, tokenizers, and conversion of chats to token ids with a loss mask."""
