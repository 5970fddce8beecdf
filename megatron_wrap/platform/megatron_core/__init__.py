"""Changes to Megatron-Core on every platform, and the differences between its versions."""
