"""One training step (`step.py`, the first file to read) and what it calls."""
