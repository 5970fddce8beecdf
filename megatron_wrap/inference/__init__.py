"""Use of trained models: a run of a folder or a checkpoint, chats and completions, the adapter for
lm-evaluation-harness."""
