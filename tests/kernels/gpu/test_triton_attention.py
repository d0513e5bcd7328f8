"""Attention over a packed KV cache in Triton's interpreter: what the cache holds against the CPU's, attention against float64."""

from __future__ import annotations

import pytest
import torch
from gpu_weights import EPS, rounding_of

from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.inference import emulated_kv_cache as emulated
from fewbits.kernels.triton import kv_cache
from fewbits.kernels.triton.device import Device
from fewbits.kernels.triton.kv_cache import PackedCache, unsupported

FORMATS = ("int8", "int4", "fp8")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] *= 20  # a channel that is large in every token
    return x.to(dtype)


def rounded(x: torch.Tensor, fmt: kv.KVFormat, keys: bool, piece: int) -> torch.Tensor:
    """What a cache that got `piece` tokens at once, then one at a time, must give back: groups are rounded when the token after them
    comes."""
    n = x.shape[2]
    end = fmt.rounded_after(max(piece, n - 1)) if fmt.group > 1 else n
    if end <= fmt.sink:
        return x.float()
    middle = x[:, :, fmt.sink : end].float()
    middle = emulated.rounded_keys(middle, fmt) if keys else emulated.rounded_values(middle, fmt)
    return torch.cat([x[:, :, : fmt.sink].float(), middle, x[:, :, end:].float()], 2)


def filled(
    fmt: kv.KVFormat, tokens: int, piece: int, heads: int = 2, width: int = 64, dtype: torch.dtype = torch.float16
) -> tuple[PackedCache, torch.Tensor, torch.Tensor]:
    cache = PackedCache(fmt, 2, heads, width, dtype)
    keys, values = (random(2, heads, tokens, width, seed=seed, dtype=dtype) for seed in (1, 2))
    cache.append(keys[:, :, :piece], values[:, :, :piece])
    for t in range(piece, tokens):
        cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
    return cache, keys, values


@pytest.mark.parametrize("tokens, piece", [(1, 1), (32, 32), (34, 1), (70, 65), (200, 170)])
@pytest.mark.parametrize("name", FORMATS)
def test_the_cache_holds_what_its_emulation_gives(name: str, tokens: int, piece: int) -> None:
    fmt = kv.get(name)
    cache, keys, values = filled(fmt, tokens, piece)
    found_keys, found_values = cache.unpacked()
    assert cache.tokens == tokens
    assert torch.equal(found_keys, rounded(keys, fmt, True, piece)) and torch.equal(found_values, rounded(values, fmt, False, piece))


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_are_appended_behind_what_is_there_and_the_cache_grows(name: str) -> None:
    """33 tokens, 50 and 90: groups that two pieces share; the space of 128 tokens is left behind when some are in it."""
    fmt = kv.get(name)
    keys, values = (random(2, 2, 173, 32, seed=seed) for seed in (1, 2))
    cache = PackedCache(fmt, 2, 2, 32, torch.float16)
    for first, end in ((0, 33), (33, 83), (83, 173)):
        cache.append(keys[:, :, first:end], values[:, :, first:end])
        found_keys, found_values = cache.unpacked()
        assert torch.equal(found_keys, rounded(keys[:, :, :end], fmt, True, end))
        assert torch.equal(found_values, rounded(values[:, :, :end], fmt, False, end))
    assert cache.packed > 128


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_zeros_and_of_one_value_have_no_range(name: str) -> None:
    fmt = kv.get(name)
    cache = PackedCache(fmt, 1, 1, 32, torch.float16)
    keys, values = torch.zeros(1, 1, 65, 32).half(), torch.full((1, 1, 65, 32), -3.0).half()
    cache.append(keys, values)
    assert torch.equal(cache.unpacked()[0], keys.float()) and torch.equal(cache.unpacked()[1], rounded(values, fmt, False, 65))
    assert fmt.name == "fp8" or torch.equal(cache.unpacked()[1], values.float())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_lies_in_the_middle_of_two_codes_goes_to_the_even_one(name: str) -> None:
    fmt = kv.get(name)
    top = len(fmt.levels or ()) - 1
    x = (torch.arange(33 * 32).reshape(1, 1, 33, 32) % top + 0.5).half()
    x[:, :, 1], x[:, :, 2] = 0, top  # a scale of 1, of every channel
    x[..., 0], x[..., 1] = 0, top  # and of every token
    cache = PackedCache(fmt, 1, 1, 32, torch.float16)
    cache.append(x, x)
    assert torch.equal(cache.unpacked()[0], rounded(x, fmt, True, 33)) and torch.equal(cache.unpacked()[1], rounded(x, fmt, False, 33))


def test_what_is_not_finite_stays_in_its_group_or_token() -> None:
    """Integers have no code for it: an infinity becomes a large number, of a channel in one group of 32 tokens. float8 keeps NaN."""
    keys = random(1, 1, 65, 32)
    plain = PackedCache(kv.get("int8"), 1, 1, 32, torch.float16)
    plain.append(keys, keys)
    for value in (torch.inf, -torch.inf):
        broken = keys.clone()
        broken[0, 0, 40, 5] = value
        cache = PackedCache(kv.get("int8"), 1, 1, 32, torch.float16)
        cache.append(broken, keys)
        found, wanted = cache.unpacked()[0][0, 0], plain.unpacked()[0][0, 0]
        assert found.isfinite().all() and found[40, 5] * value == torch.inf and found[40, 5].abs() > 60000
        touched = torch.zeros_like(found, dtype=torch.bool)
        first = kv.get("int8").sink
        touched[first + (40 - first) // 32 * 32 : first + (40 - first) // 32 * 32 + 32, 5] = True
        assert torch.equal(found[~touched], wanted[~touched])
    broken = keys.clone()
    broken[0, 0, 40, 5] = torch.nan
    cache = PackedCache(kv.get("fp8"), 1, 1, 32, torch.float16)
    cache.append(broken, keys)
    found = cache.unpacked()[0][0, 0]
    assert found[40, 5].isnan() and found[[row for row in range(65) if row != 40]].isfinite().all()


def exact(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, and the most that the kernel's roundings can move it."""
    dtype, width, n = q.dtype, q.shape[3], keys.shape[2]
    share = q.shape[1] // keys.shape[1]
    q, k, v = q.double(), keys.double().repeat_interleave(share, 1), values.double().repeat_interleave(share, 1)
    factor = width**-0.5
    score = q @ k.transpose(2, 3) * factor
    p = score.softmax(3)
    out = p @ v
    # a score: keys rounded to q's type, width products added up, two multiplications
    moved = factor * (q.abs() @ rounding_of(dtype, k).transpose(2, 3) + (width + 4) * EPS * (q.abs() @ k.abs().transpose(2, 3)))
    # exp2 of the interpreter is good to a rounding or two, of a GPU to 2 ulp; the sum of n weights has n roundings; both ends of a
    # fraction move
    relative = torch.expm1(2 * moved.amax(3, keepdim=True)) + (2 * n + 16) * EPS
    eps = torch.finfo(dtype).eps / 2
    # weights of tokens are rounded to q's type (to the smallest step at least, beside a largest one of 1), and so are values
    allowed = relative * (p @ v.abs()) + eps * (p @ v.abs()) + p @ rounding_of(dtype, v)
    allowed = allowed + torch.finfo(dtype).smallest_normal * eps * v.abs().sum(2, keepdim=True)
    return out, allowed * 1.01 + rounding_of(dtype, out.abs() + allowed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_attention_is_that_over_the_unpacked_cache(name: str, dtype: torch.dtype) -> None:
    """Grouped queries; 150 tokens are several splits and a rest."""
    cache, _, _ = filled(kv.get(name), 150, 140, heads=2, dtype=dtype)
    q = random(2, 6, 1, 64, seed=5, dtype=dtype) / 8
    y = cache.attend(q)
    wanted, allowed = exact(q, *cache.unpacked())
    assert y.dtype == dtype and ((y.double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("name", FORMATS)
def test_attention_of_one_program_over_many_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of one processor has one split: four groups and the rest go through the same running maximum, which each group raises."""
    monkeypatch.setattr(kv_cache, "device_of", lambda _: Device("sm_80", 1))
    keys, values = (random(1, 1, 140, 32, seed=seed) for seed in (1, 2))
    keys = keys * (torch.arange(140) / 40).reshape(1, 1, 140, 1).half()
    cache = PackedCache(kv.get(name), 1, 1, 32, torch.float16)
    cache.append(keys, values)
    q = random(1, 3, 1, 32, seed=5) / 8
    wanted, allowed = exact(q, *cache.unpacked())
    assert ((cache.attend(q).double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("tokens", [1, 5, 33, 34, 65])
@pytest.mark.parametrize("name", FORMATS)
def test_attention_over_few_tokens_and_odd_widths(name: str, tokens: int) -> None:
    cache, _, _ = filled(kv.get(name), tokens, tokens, heads=1, width=40)
    q = random(2, 1, 1, 40, seed=6) / 8
    wanted, allowed = exact(q, *cache.unpacked())
    assert ((cache.attend(q).double() - wanted).abs() <= allowed).all()


def test_large_scores_do_not_overflow() -> None:
    cache, _, _ = filled(kv.get("int8"), 100, 100)
    q = random(2, 2, 1, 64, seed=7) * 50
    y = cache.attend(q)
    assert y.isfinite().all()
    lo, hi = cache.unpacked()[1].amin(2, keepdim=True), cache.unpacked()[1].amax(2, keepdim=True)
    slack = rounding_of(torch.float16, torch.maximum(lo.abs(), hi.abs()).double()) * 3
    assert (y.double() >= lo - slack).all() and (y.double() <= hi + slack).all()  # a mean of values lies among them


def test_what_cannot_be_packed_is_refused_with_a_reason() -> None:
    assert unsupported(kv.get("float"), 64) == "its values are not rounded"
    assert "even number of bytes" in str(unsupported(kv.get("int4"), 6))
    with pytest.raises(InputError, match="cannot be kept packed"):
        PackedCache(kv.get("int8"), 1, 1, 512, torch.float16)
    cache = PackedCache(kv.get("int8"), 1, 2, 64, torch.float16)
    with pytest.raises(InputError, match="nothing to read"):
        cache.attend(random(1, 2, 1, 64))
    for keys, values in ((random(1, 1, 3, 64), random(1, 1, 3, 64)), (random(1, 2, 3, 64), random(1, 2, 2, 64))):
        with pytest.raises(InputError, match="do not belong into this cache"):
            cache.append(keys, values)
    cache.append(random(1, 2, 3, 64), random(1, 2, 3, 64))
    with pytest.raises(InputError, match="do not belong to this cache"):
        cache.attend(random(1, 3, 1, 64))
