"""GGUF files as checkpoints: header.py reads the bytes, checkpoint.py gives tensors under transformers' names, architectures/ maps
configs and parameter names, vocabularies.py tokenizers, metadata.py carries unknown keys into the next file. All in both directions."""
