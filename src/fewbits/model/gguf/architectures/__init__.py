"""How llama.cpp stores a transformers architecture: its name there, its metadata, the names and the order of rows of its tensors.

table.py     one entry per architecture                     limits.py   models that llama.cpp would compute differently
metadata.py  config -> keys of a file, and back             tensors.py  parameter -> tensors of a file
rotary.py    rotary frequencies and their scaling           numbers.py  a float32 with the fewest digits
"""

from fewbits.model.gguf.architectures.limits import unsupported
from fewbits.model.gguf.architectures.metadata import config_of, metadata
from fewbits.model.gguf.architectures.rotary import FACTORS, factors
from fewbits.model.gguf.architectures.table import KNOWN, Architecture, Value, of
from fewbits.model.gguf.architectures.tensors import Place, Places, tensor_names

__all__ = [
    "FACTORS",
    "KNOWN",
    "Architecture",
    "Place",
    "Places",
    "Value",
    "config_of",
    "factors",
    "metadata",
    "of",
    "tensor_names",
    "unsupported",
]
