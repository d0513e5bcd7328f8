"""In: a model and texts. Out: how near files by other quantizers and by ours come to the float model, when they have the same size."""
