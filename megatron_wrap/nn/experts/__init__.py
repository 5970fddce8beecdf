"""Mixtures of experts: the router, the order of rows by expert, and the experts' matmuls."""
