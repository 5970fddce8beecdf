"""The console script `megatron-wrap`: one file for each subcommand, imported only when that subcommand runs."""
