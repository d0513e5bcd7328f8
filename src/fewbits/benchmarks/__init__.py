"""`fewbits bench`: measurements against other libraries and against this machine's limits, as ratios within one run. Clocks of two machines
are never compared.

speed    seconds of products, of rounding, of decoding and of whole models (kernels, quantize, dequantize, decode)
quality  KL of files of the same size by several quantizers, in llama.cpp and transformers (quality, plans)
scale    time and memory against the size of the model and the number of workers (cost, scale, workers)
gpu      the Triton kernels, compiled or timed
peers    ggml, onnxruntime and torch as contenders; AutoRound and llm-compressor in environments of their own
tables   what all of these show
"""
