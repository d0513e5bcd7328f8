"""Questions about models and files that are answered without quantizing: a path or statistics in, figures out.

contents.py  `fewbits inspect`: tensors of a file       sizes.py   bytes and bits per weight of a written file
formats.py   `fewbits compare`: error of each format    ranges.py  `fewbits compare --stats`: range estimators of activations
capacity/    `fewbits fit`: does a model fit a device
"""
