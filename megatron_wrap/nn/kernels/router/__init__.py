"""Triton kernels of the router of a mixture of experts, and what they support."""
