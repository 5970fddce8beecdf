"""Process groups, the launch of processes, collectives and the split of sequences over context-parallel ranks."""
