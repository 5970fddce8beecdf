"""Where a run is started: a file for each section of `megatron_wrap.launch`."""
