"""Linear attention: layers whose state has the same size for any number of tokens."""
