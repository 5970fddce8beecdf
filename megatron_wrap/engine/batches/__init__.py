"""From a global batch of samples to this process's micro-batches."""
