"""The samples of each batch of a run and their order, and the processes that read them ahead."""
