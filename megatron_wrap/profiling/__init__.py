"""Profiling of a training step: traces, kernels by kind, the table of a step, suggested changes."""
