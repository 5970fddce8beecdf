"""Process groups, process launch, collectives, and the split of sequences over context-parallel ranks."""
