"""Runs an artifact: packed weights in, logits or text out.

engine.py               `fewbits run`; opens a file with the engine or the runtime it is for
text_model.py           what every loaded model can do, and one continuation while it grows (generated.py: its result)
stepped_model.py        a text model over an engine that computes logits: sampling, and what is kept of the text before
conversation.py         the turns of a chat; serving/ is `fewbits serve`
llama.py                the native decoder of the Llama family, with decode_matrices.py and decode_kv_caches.py
transformers_engine.py  every other architecture: transformers' module, loaded by transformers_loader.py (registered by registration.py)
mlx_folder.py, genai_folder.py   folders of other runtimes, run by these
packed_weights.py       packed weights in the place of a torch module's parameters
emulated_kv_cache.py, rounded_inputs.py   a quantized KV cache and rounded activations, emulated in float modules
"""
