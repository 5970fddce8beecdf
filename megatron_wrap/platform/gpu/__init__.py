"""GPUs over NCCL."""
