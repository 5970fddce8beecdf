"""Monitoring within the processes of a run: their progress, the requests that stop them, and their last collectives."""
