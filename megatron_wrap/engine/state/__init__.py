"""State of a run between steps: counters, parameters, optimizer."""
