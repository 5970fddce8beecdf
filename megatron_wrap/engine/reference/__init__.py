"""The reference or teacher model: its weights, its outputs, and outputs computed before training."""
