"""The console script `megatron-wrap`: one file for each subcommand, imported when it is called."""
