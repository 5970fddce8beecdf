"""Linear layers: communication that overlaps with their matmuls, and quantized weights."""
