"""Reads a YAML file over the tree of YAML files: positions, composition, the origin of each value."""
