"""One training step and what is built for it; evaluation, generation and the comparison with transformers."""
