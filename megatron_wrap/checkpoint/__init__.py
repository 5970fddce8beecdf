"""Checkpoints: `files` publishes, removes and lists their folders, `precheck` validates them without torch, `save_load`
writes and reads a run's state, `resume` chooses the checkpoint that a run starts from."""
