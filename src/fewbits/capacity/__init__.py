"""Will it run: `fewbits fit`. The arithmetic of memory is in fewbits.hardware, which plans share.

devices.py   the catalogue (devices.csv)             configs.py   a config.json read as it is, with what transformers would add
outline.py   a config's tensors                      sources.py   a folder, a GGUF or a number of parameters -> config and tensors
forecasts.py tokens per second                       judging.py   all of it together: the verb
"""
