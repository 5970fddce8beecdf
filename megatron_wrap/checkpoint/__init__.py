"""Checkpoints: `save` and `load` write and read a run's state, `run_checkpoints` chooses the one that a run begins
with, `saved_run` compares it with the run without torch, `files` publishes, verifies and removes the files."""
