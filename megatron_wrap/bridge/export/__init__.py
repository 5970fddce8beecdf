"""Export of Hugging Face folders: the family, the gathered weights, the files, uploads."""
