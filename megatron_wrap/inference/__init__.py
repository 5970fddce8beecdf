"""Use of trained models: the run of a folder or a checkpoint, chats and completions, the adapter for
lm-evaluation-harness."""
