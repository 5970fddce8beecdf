"""Megatron's indexed data: PREFIX.bin with tokens, PREFIX.idx with the length of each document."""
