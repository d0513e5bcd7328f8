"""How llama.cpp sees a transformers architecture: its name there, its metadata, the names and rows of its tensors.

table.py     one row per architecture                       limits.py   what llama.cpp would compute otherwise
metadata.py  config -> keys of a file, and back             tensors.py  parameter -> tensors of a file
rotary.py    frequencies, and what scales them              numbers.py  a float32 as a person writes it
"""

from fewbits.architectures.limits import unsupported
from fewbits.architectures.metadata import config_of, metadata
from fewbits.architectures.rotary import FACTORS, factors
from fewbits.architectures.table import KNOWN, Architecture, Value, of
from fewbits.architectures.tensors import Place, Places, tensor_names

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
