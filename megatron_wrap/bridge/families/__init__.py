"""One file a family: a table of names and the translation of its configuration."""
