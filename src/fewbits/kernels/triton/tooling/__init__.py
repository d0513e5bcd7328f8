"""Kernels without a GPU: compiled ahead of time, checked, modelled and shipped. In: cases and architectures; out: rows about compiled code.

cases, compiler, assembly, occupancy   every kernel as it is launched, compiled for GPUs that are not here, and what the code shows
gpus, roofline                         how long a product should take on the GPUs of the catalogue
shipped                                a folder of compiled kernels, put into Triton's cache on another machine
tensorrt                               the int4 product as a TensorRT plugin, and int4 weights as ONNX for TensorRT's importer
"""
