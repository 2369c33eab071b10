"""Weights in a checkpoint, measured before any run exists: safetensors in, a trace out."""
