"""In: formats, shapes and architectures. Out: what the Triton compiler made of each kernel, or how fast products are on this GPU."""
