"""The `@triton.jit` functions. In: pointers, sizes and compile-time constants (upper case); out: arrays in the GPU's memory.

products, decode        products with packed weights and the decoding that is inlined into them
blocks, integers, microscaling, super_blocks   how each family of formats reads its scales and offsets (`affine...`)
float8, w8a8            products of 8-bit activations with 8-bit weights
attention, statistics   attention over a packed KV cache; statistics for calibration
"""
