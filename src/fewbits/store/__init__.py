"""Files on disk: results cached so that a killed run resumes, outputs that appear whole or not at all, and the workers that share them.

cache.py, maker.py      results of a long run, named by what they were made from; which program and machine made them
files.py, scratch.py    outputs staged under a temporary name; temporary folders that are cleaned up even after a kill
mapped.py, heap.py      tensors that may exceed memory; freed memory returned to the system
threads.py              how many threads work on one weight
tensor_file.py, untrusted.py, dtypes.py    safetensors, JSON and text that anybody may have made, checked before they are read
remote.py, executors/   a store that machines share (fsspec), and the processes or machines that do the work
"""
