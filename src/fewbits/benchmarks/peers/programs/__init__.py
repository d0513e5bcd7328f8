"""What is run inside a peer's own environment, with its Python: `python -P NAME.py job.json`. These files import nothing of fewbits.

A job names the model's folder, a file of token ids to calibrate with, a folder to write to, and settings. A program ends with made.json in
that folder: the file or folder that it made, and the versions that made it.
"""
