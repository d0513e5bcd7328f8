"""What `--size` means, in bytes for the tensors of the weights that a plan decides on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from fewbits.devices.units import parse_memory
from fewbits.errors import InputError
from fewbits.planning import recipes

_MOST_BITS = 32  # a weight in float32
_EXAMPLES = "for example `4.5bpw`, `3.2GB`, `900MiB` or `q4_k_m`"


@dataclass(frozen=True)
class BitsPerWeight:
    """On average over all weights, embeddings and output included; norms, biases and the container are not counted."""

    bits: Fraction  # exact: 4.1 in binary would miss a size that 4.1 bits make up to the byte


@dataclass(frozen=True)
class FileBytes:
    """The size of the whole file: weights, norms, biases and the container."""

    nbytes: int


@dataclass(frozen=True)
class Recipe:
    """As many bytes as the weights take in llama.cpp's mix of this name."""

    name: str


Size = BitsPerWeight | FileBytes | Recipe


def parse_size(text: str) -> Size:
    """`4.5bpw`, `3.2GB` (10^9), `3GiB` (2^30), `3200000000`, or the name of one of llama.cpp's recipes; in any case."""
    plain = text.strip()
    number, unit = _split(plain)
    if number is not None and unit == "bpw":
        return BitsPerWeight(_bits(number, text))
    if number is not None and not unit and (number < 1000 or number.denominator != 1):
        raise InputError(f"`--size {text}` has no unit", f"did you mean `{plain}bpw` (bits per weight) or `{plain}GB` (of the file)?")
    if plain[:1].isdigit() or plain[:1] == ".":
        return FileBytes(parse_memory(plain, "--size", _EXAMPLES))
    if not re.match(r"[a-z]+[0-9]", plain, re.IGNORECASE):  # every recipe begins so; no NaN, infinity or negative number does
        raise InputError(f"`--size {text}` is not a size", _EXAMPLES)
    return Recipe(recipes.check(plain))


def tensor_bytes(size: Size, weights: int, container: int, recipe_bytes: Callable[[str], int]) -> int:
    """Bytes that the tensors of the planned weights may take.

    `weights`: how many numbers they hold. `container`: what the file holds beside them: norms and biases, header, tokenizer.
    `recipe_bytes`: `recipes.nbytes` for this model, called only if a recipe was named.
    """
    match size:
        case BitsPerWeight(bits):
            return math.floor(bits * weights / 8)
        case Recipe(name):
            return recipe_bytes(name)
        case FileBytes(nbytes):
            left = nbytes - container
            if left <= 0:
                raise InputError(
                    f"{nbytes:,} bytes leave nothing for the weights: what lies beside them in the file takes {container:,}",
                    "raise `--size`",
                )
            return left


def _split(text: str) -> tuple[Fraction | None, str]:
    """(number, unit in lower case); the number is None if the text does not begin with one."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) *([a-z]*)", text, re.IGNORECASE | re.ASCII)
    return (Fraction(Decimal(match[1])), match[2].lower()) if match else (None, "")


def _bits(bits: Fraction, text: str) -> Fraction:
    if bits == 0:
        raise InputError(f"`--size {text}` leaves no bits at all", _EXAMPLES)
    if bits > _MOST_BITS:
        raise InputError(f"`--size {text}` is more than the {_MOST_BITS} bits of a float32 weight", _EXAMPLES)
    return bits
