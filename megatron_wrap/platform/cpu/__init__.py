"""CPU processes over gloo."""
