"""Where the time of a training step goes: traces, kernels by kind, the table of a step, suggested changes."""
