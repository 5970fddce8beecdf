"""Builds the state of a run from its configuration."""
