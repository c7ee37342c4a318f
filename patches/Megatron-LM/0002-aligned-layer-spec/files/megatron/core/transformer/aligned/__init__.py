"""Modules whose forward is the serving engine's, bit for bit; see `gpt_aligned_layer_specs`."""
