"""megatron-wrap: write a training algorithm once, prove it on every parallel layout, run it on Megatron-Core.

Importing the package does no work: no torch, no Megatron-Core, no process group.
"""

__version__ = "0.3.0"
