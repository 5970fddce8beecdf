"""One file per family: the mapping of its weights and the translation of its configuration."""
