"""Reads Hugging Face folders: downloads, weight files, loading into the parameters of this process."""
