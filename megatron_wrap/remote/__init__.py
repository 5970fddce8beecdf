"""Files of object stores and of Hugging Face repositories."""
