"""Adapters of frozen layers: low-rank factors, and parameters that are trained whole."""
