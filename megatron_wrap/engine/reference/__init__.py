"""The reference model, or the teacher: its weights, its outputs, and outputs computed before training."""
