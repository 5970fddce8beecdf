"""Observation of a run's processes by the program that starts them."""
