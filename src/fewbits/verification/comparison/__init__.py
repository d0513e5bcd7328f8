"""Anybody's files of one model, each in its own runtime, on the same tokens: `fewbits compare FILE... --against MODEL`.

candidates.py  files and folders in, what a runtime takes and what none does out
trial.py       runs them one after another; the float model is run once for all
figures.py     differences with paired intervals, and the frontier of bytes against KL
speed.py       tokens per second on this machine
"""
