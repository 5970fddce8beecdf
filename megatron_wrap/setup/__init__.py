"""The objects of a run, built from its configuration."""
