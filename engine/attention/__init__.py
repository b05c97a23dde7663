"""Attention over a paged KV cache: one interface, one file a backend."""
