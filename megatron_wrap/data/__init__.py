"""Data files, the order of samples, tokenizers, and the conversion of chats to token ids with a loss mask."""
