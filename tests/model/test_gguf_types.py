"""Our table of ggml's types against the gguf package's, and against ggml itself."""

from __future__ import annotations

import ctypes

import gguf
import pytest

from fewbits import formats
from fewbits.benchmarks.peers import ggml
from fewbits.model.gguf.types import BY_NAME, BY_NUMBER, Type

BESIDE_PRODUCTS = {"Q8_1", "Q8_K"}  # of activations: no file holds them


def test_it_says_what_the_gguf_package_says() -> None:
    theirs = {kind.name: Type(kind.name, int(kind), *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {name: each for name, each in BY_NAME.items() if name in theirs} == {
        name: each for name, each in theirs.items() if name not in BESIDE_PRODUCTS
    }


@pytest.mark.parametrize("kind", BY_NUMBER.values(), ids=lambda kind: kind.name)
def test_ggml_has_it_under_this_number_in_these_blocks(kind: Type) -> None:
    lib = ggml.library()
    lib.ggml_type_name.restype = ctypes.c_char_p
    assert lib.ggml_type_name(kind.number).decode().upper() == kind.name
    assert (lib.ggml_blck_size(kind.number), lib.ggml_type_size(kind.number)) == (kind.block, kind.nbytes)


def test_every_quantized_type_is_a_format_so_that_any_file_can_be_decoded() -> None:
    for name, kind in ggml.QUANTIZED.items():
        fmt = formats.get(name)
        assert fmt.nbytes((1, 256)) == 256 // kind.block * kind.nbytes, name
