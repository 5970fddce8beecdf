"""Linear layers: communication hidden behind their products, and quantized weights."""
