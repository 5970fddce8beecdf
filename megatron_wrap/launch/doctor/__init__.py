"""`megatron-wrap doctor`: checks of the nodes of a run, before it begins."""
