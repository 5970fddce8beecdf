"""Sections of a configuration as frozen dataclasses, and the values that follow from them."""
