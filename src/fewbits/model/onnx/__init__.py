"""ONNX files: graph.py opens one, constants.py says which of its tensors are weights, and external_data.py and inline_data.py write
arrays beside a graph or into it, one in memory at a time."""
