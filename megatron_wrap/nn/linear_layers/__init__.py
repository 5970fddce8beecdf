"""Linear layers: communication that overlaps with their products, and quantized weights."""
