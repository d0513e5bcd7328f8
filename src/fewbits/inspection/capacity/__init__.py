"""`fewbits fit`: a model and a device in; for every format the memory it takes, whether it fits and how fast it would be, out.

estimate.py  the verb                                   speed.py    tokens per second
sources.py   a folder, a GGUF or a number of parameters -> config and weights
configs.py   a config.json, with the defaults of transformers
outline.py   the weights of a config

planning/footprint.py counts the memory, and devices/ has the catalogue.
"""
