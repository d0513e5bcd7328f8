"""Runs a written file in the runtime it is meant for, beside the float model in torch, and judges the difference.

files.py            `fewbits verify`: file, float model and text in, a verdict out
metrics.py, embeddings.py   KL, perplexity and agreement of language models; cosines of encoders; thresholds
streamed.py         a model run over many windows one block at a time
resume.py           windows that were judged, cached; sandbox.py opens a file in another process first
crosscheck.py       whether a runtime computes what the file says; kv.py: what a quantized KV cache costs
runtimes/           one file per runtime; forecast/: measures a model's weights ahead of planning (`fewbits measure`)
"""
