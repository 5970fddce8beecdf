"""Layers of the model: attention, packed rows, norms, rotary embedding, SwiGLU, experts."""
