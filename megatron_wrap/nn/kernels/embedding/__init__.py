"""The lookup of word embeddings, and its gradient."""
