"""ggml's types of tensors: their numbers and the sizes of their blocks, which tests compare with ggml's own.

The gguf package has such a table too. It is published later than types are (Q2_0 is not in 0.19, NVFP4 and Q1_0 are not in 0.18), and
importing it takes a third of the time of `fewbits formats`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Type:
    name: str  # in capitals, as the gguf package has it: `Q4_K`
    number: int
    block: int  # numbers that are stored together
    nbytes: int  # of a block


# number, block, bytes of a block. Q8_1 and Q8_K, which ggml rounds activations to, are in no file
_TABLE = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "F64": (28, 1, 8),
    "I8": (24, 1, 1), "I16": (25, 1, 2), "I32": (26, 1, 4), "I64": (27, 1, 8),
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
    "IQ1_S": (19, 256, 50), "IQ1_M": (29, 256, 56), "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ2_S": (22, 256, 82),
    "IQ3_XXS": (18, 256, 98), "IQ3_S": (21, 256, 110), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136),
    "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66), "Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18),
    "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36),
}  # fmt: skip
BY_NAME = {name: Type(name, *sizes) for name, sizes in _TABLE.items()}
BY_NUMBER = {each.number: each for each in BY_NAME.values()}
