"""One training step and the objects it needs; evaluation, generation, and verification against transformers."""
