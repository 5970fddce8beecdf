"""Which samples form each batch of a run, in which order, and the processes that read them ahead."""
