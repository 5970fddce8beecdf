"""Contradictions in a configuration: refused with the legal values named, never repaired."""
