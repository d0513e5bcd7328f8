"""Formats of what exists only while a model runs: activations (the inputs of matmuls) and the KV cache.

A name from the command line comes in; a small frozen description goes out, which says how to round and what it takes.
"""
