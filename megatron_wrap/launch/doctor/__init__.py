"""`megatron-wrap doctor`: what is wrong with the nodes of a run, before it begins."""
