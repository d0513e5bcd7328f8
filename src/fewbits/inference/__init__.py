"""Runs an artifact: packed weights in, logits or text out.

engine.py               `fewbits run`: prompt, sampling, statistics; chooses one of the two engines
llama.py                the native decoder of the Llama family, with decode_matrices.py and decode_kv_caches.py
transformers_engine.py  every other architecture: transformers' module, loaded by transformers_loader.py (registered by registration.py)
packed_weights.py       packed weights in the place of a torch module's parameters
emulated_kv_cache.py, rounded_inputs.py   a quantized KV cache and rounded activations, emulated in float modules
"""
