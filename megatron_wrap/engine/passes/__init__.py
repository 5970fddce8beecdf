"""Forward and backward passes over micro-batches: the pipeline schedule, the loss, the reduction of metrics."""
