"""Pools of processes and threads that compute items in order."""
