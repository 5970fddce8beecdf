"""fp32 means fp32 in these tests, whichever of them uses cuBLAS first: it reads the variable once."""

import os

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
