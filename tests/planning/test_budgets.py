from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbits.errors import InputError
from fewbits.planning import budgets
from fewbits.planning.budgets import BitsPerWeight, FileBytes, Recipe, parse_size, tensor_bytes

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "tib": 2**40, "B": 1}


def never_asked(name: str) -> int:
    raise AssertionError(f"nobody named {name}")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4.5bpw", BitsPerWeight(Fraction(9, 2))),
        ("4.1 BPW", BitsPerWeight(Fraction(41, 10))),
        ("32bpw", BitsPerWeight(Fraction(32))),
        ("3.2GB", FileBytes(3_200_000_000)),
        (" 3.2 gb ", FileBytes(3_200_000_000)),
        ("1.5GiB", FileBytes(3 << 29)),
        (".5MB", FileBytes(500_000)),
        ("123456", FileBytes(123_456)),
        ("q4_k_m", Recipe("q4_k_m")),
        ("IQ4_XS", Recipe("iq4_xs")),
        ("iq2_m", Recipe("iq2_m")),
        ("Q4_K", Recipe("q4_k_m")),
    ],
)
def test_every_way_to_name_a_size_is_read(text: str, size: budgets.Size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("4.5", "no unit", "`4.5bpw`"),
        ("4", "no unit", "`4GB`"),
        ("0bpw", "no bits", "4.5bpw"),
        ("40bpw", "more than the 32 bits", "4.5bpw"),
        ("-4.5bpw", "not a size", "4.5bpw"),
        ("-3GB", "not a size", "3.2GB"),
        ("+3GB", "not a size", "3.2GB"),
        ("0GB", "is nothing", "3.2GB"),
        ("0.0001B", "less than a byte", "3.2GB"),
        ("nan", "not a size", "4.5bpw"),
        ("NaNbpw", "not a size", "4.5bpw"),
        ("inf", "not a size", "4.5bpw"),
        ("infGB", "not a size", "4.5bpw"),
        ("", "not a size", "4.5bpw"),
        ("bpw", "not a size", "4.5bpw"),
        ("GB", "not a size", "4.5bpw"),
        ("4.5bp", "not a number of bytes", "4.5bpw"),
        ("4..5GB", "not a number of bytes", "3.2GB"),
        ("1e9", "not a number of bytes", "3.2GB"),
        ("3 XB", "not a number of bytes", "3.2GB"),
        ("\u0663GB", "not a number of bytes", "3.2GB"),  # a digit of another script
        ("q4_k_n", "no recipe `q4_k_n`", "`q4_k_m`"),
        ("iq4xs", "no recipe `iq4xs`", "`iq4_xs`"),
        ("iq2_l", "no recipe `iq2_l`", "`iq2_m`"),
    ],
)
def test_what_is_no_size_is_refused_with_a_hint(text: str, says: str, hint: str) -> None:
    with pytest.raises(InputError, match=says) as wrong:
        parse_size(text)
    assert hint in wrong.value.hint


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_the_users_error(text: str) -> None:
    try:
        size = parse_size(text)
    except InputError as wrong:
        assert wrong.hint
    else:
        assert isinstance(size, BitsPerWeight | FileBytes | Recipe)


@given(st.decimals("0.001", "9999", places=3), st.sampled_from(list(UNITS)))
def test_bytes_are_exact_and_never_more_than_was_said(number: Decimal, unit: str) -> None:
    exact = Fraction(number) * UNITS[unit]
    if exact < 1:
        return
    size = parse_size(f"{number}{unit}")
    assert isinstance(size, FileBytes)
    assert size.nbytes <= exact < size.nbytes + 1


@given(st.integers(1, 3200), st.integers(1, 10**12))
def test_bits_per_weight_are_used_up_to_the_byte_and_not_exceeded(hundredths: int, weights: int) -> None:
    size = parse_size(f"{hundredths // 100}.{hundredths % 100:02}bpw")
    nbytes = tensor_bytes(size, weights, container=456, recipe_bytes=never_asked)
    assert 800 * nbytes <= hundredths * weights < 800 * (nbytes + 1)  # in integers: hundredths of a bit


def test_bits_that_make_whole_bytes_lose_none() -> None:
    """4.1 is no binary fraction: as a float it would come out a byte short or over for some of these."""
    for weights in range(80, 80_000, 80):
        assert tensor_bytes(parse_size("4.1bpw"), weights, 0, never_asked) == weights // 80 * 41


@given(st.integers(1000, 10**12), st.integers(0, 10**9))
def test_a_file_of_so_many_bytes_holds_the_weights_and_the_container(nbytes: int, container: int) -> None:
    if nbytes <= container:
        with pytest.raises(InputError, match="leave nothing for the weights"):
            tensor_bytes(FileBytes(nbytes), 10, container, never_asked)
    else:
        assert tensor_bytes(FileBytes(nbytes), 10, container, never_asked) + container == nbytes


def test_a_recipe_is_priced_by_who_knows_the_model() -> None:
    prices = {"q4_k_m": 103_527_936}
    assert tensor_bytes(parse_size("Q4_K_M"), 134_479_872, container=2_140_544, recipe_bytes=prices.__getitem__) == 103_527_936
