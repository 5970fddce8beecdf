"""Remote folders and files that a configuration names."""
