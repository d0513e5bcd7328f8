"""Attention over a cache that stays packed: what is packed is what kv_cache imitates, and what is read is its softmax, within a bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fewbits.devices import processor
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.formats.runtime.kv import KVFormat
from fewbits.inference.emulated_kv_cache import EmulatedKVCache
from fewbits.kernels import attention
from fewbits.kernels.attention import PackedCache

U = 2.0**-24
PATHS = ("avx512", "avx2", "scalar")
SYMMETRIC = KVFormat(
    name="int8 symmetric", about="", bits=8, levels=tuple(float(level) for level in range(-127, 128)), largest=127.0, channels=32
)
FORMATS = {
    "int8": kv.get("int8"),
    "int4": kv.get("int4"),
    "int4 in runs": replace(kv.get("int4"), channels=16, sink=3),
    "int4 by token": replace(kv.get("int4"), keys="token", channels=32),
    "int8 by token, at once": replace(kv.get("int8"), keys="token", group=1, sink=0),
    "int8 symmetric": SYMMETRIC,
}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    isa: str = request.param
    assert processor.native_missing() is None
    if isa not in processor.native().attention_isas():
        pytest.skip(f"this processor has no {isa}")
    monkeypatch.setattr(attention, "_isa", lambda: isa)
    return isa


@pytest.fixture(params=list(FORMATS))
def fmt(request: pytest.FixtureRequest) -> KVFormat:
    return FORMATS[request.param]


def states(tokens: int, width: int, seed: int, sequences: int = 2) -> Tensor:  # (sequences, 2 heads, tokens, width), as models have them
    x = torch.randn(sequences, 2, tokens, width, generator=torch.Generator().manual_seed(seed))
    x[..., width // 2] += 12
    x[..., 0, :] *= 9
    return x


def filled(fmt: KVFormat, tokens: int, width: int, factor: float = 1.0) -> PackedCache:
    """Most of it at once, the last tokens one by one."""
    cache, keys, values = PackedCache(fmt, 2, 2, width), states(tokens, width, 0) * factor, states(tokens, width, 1)
    at_once = max(0, tokens - 3)
    if at_once:
        cache.append(keys[:, :, :at_once], values[:, :, :at_once])
    for t in range(at_once, tokens):
        cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
    return cache


def fields(cache: PackedCache, part: str) -> tuple[Tensor, Tensor, Tensor]:  # code, scale, offset of packed tokens: (heads, tokens, width)
    fmt, n, groups = cache.format, cache.packed, slice(0, -(-cache.packed // 32))
    assert fmt.levels
    codes = (cache._key_codes if part == "key" else cache._value_codes)(groups)[:, :n].double()
    scale = cache._scales[part].double()
    offset = cache._scales[f"{part} minimum"].double() if fmt.minimum else scale * fmt.levels[0]

    def spread(entries: Tensor) -> Tensor:
        if part == "key" and fmt.keys == "channel":
            return entries.repeat_interleave(32, 1)[:, :n]
        return entries[:, :, :n].transpose(1, 2).repeat_interleave(fmt.channels or cache.width, 2)[..., : cache.width]

    return codes, spread(scale), spread(offset)


def gamma(n: int) -> float:
    return n * U / (1 - n * U)


def bound(cache: PackedCache, q: Tensor, isa: str) -> Tensor:
    """How far float32 can take attention from the exact one over the same codes; q and the result are (sequences, heads, 1, width).

    A score is a sum of `width` products with q * scale and as many with q * offset, each rounded width + 10 times at most: it errs by
    E = gamma(width + 10) of their magnitudes. AVX2 and AVX-512 round q * scale to integers, half a unit off (a unit is the largest over
    32767, with AVX-512 over 127 * 2**16 for 8 bits and over 127 * 2**8 for 4), and a whole one more where 24 bits meet float32's own:
    that times the codes. What is below 2**-100 may be 0: 2**-84 in a sum. Weights are then off by a factor within exp(E + 200 U),
    arguments of up to 90 being rounded for two exponentials. A factor that all share cancels, so let that of the heaviest token be 1 and
    the others' within 1 +- eta. Normalized, the result is off by the sum of weight * eta *
    |value - result|, over 1 - sum of weight * eta. Values are sums over parts of 512 tokens, and so is what they are divided by; their
    factors are rounded to units in blocks of 128 tokens.
    """
    width, n = cache.width, cache.packed
    units = {"avx2": 0.51 / 32767, "avx512": 1.6 / (127 * 2**16) if cache.format.bits == 8 else 0.51 / (127 * 2**8)}
    unit = units.get(isa, 0.0)
    value_unit = max(units.values()) if unit and min(cache.format.channels or width, width) % 32 else unit  # AVX2 does the last columns
    queries = q.double().reshape(cache.sequences * cache.heads, -1, width) * width**-0.5
    rest_keys, rest_values = cache._rest_keys[:, :, : cache.rest].double(), cache._rest_values[:, : cache.rest].double()
    (code, scale, offset), (value_code, value_scale, value_offset) = fields(cache, "key"), fields(cache, "value")
    scores = torch.cat([queries @ (code * scale + offset).transpose(1, 2), queries @ rest_keys], 2)
    sizes = torch.cat([queries.abs() @ (code * scale + offset.abs()).transpose(1, 2), queries.abs() @ rest_keys.abs()], 2)
    errors = gamma(width + 10) * sizes
    if n:
        factor = queries.abs().amax(2, keepdim=True) * scale.amax(2).unsqueeze(1)
        errors[:, :, :n] += unit * factor * code.sum(2).unsqueeze(1) + 2.0**-84
    weights = scores.softmax(2)
    heaviest = weights.argmax(2, keepdim=True)
    eta = torch.expm1(errors + errors.gather(2, heaviest) + 400 * U).scatter(2, heaviest, 0.0)
    exact = torch.cat([value_code * value_scale + value_offset, rest_values], 1)
    sizes = torch.cat([value_code * value_scale + value_offset.abs(), rest_values.abs()], 1)
    distance = (exact.unsqueeze(1) - (weights @ exact).unsqueeze(2)).abs()  # (heads, queries, tokens, width)
    moved = (weights * eta).sum(2, keepdim=True)
    assert (moved < 1).all()
    result = ((weights * eta).unsqueeze(2) @ distance).squeeze(2) / (1 - moved) + gamma(2 * 512 + 50) * (weights @ sizes)
    for start in range(0, n, 128):
        block = slice(start, min(n, start + 128))
        # channels of a run have the same scale; of several runs the largest will do
        factor = (weights[:, :, block] * value_scale[:, block].amax(2).unsqueeze(1)).amax(2, keepdim=True)
        result += value_unit * factor * value_code[:, block].sum(1).unsqueeze(1)
    return result.view(q.shape) + 2.0**-84


def exact(cache: PackedCache, q: Tensor) -> Tensor:
    keys, values = cache.unpacked()
    return scaled_dot_product_attention(q.double(), keys.double(), values.double(), enable_gqa=True)


def queries(width: int, per_head: int, factor: float = 1.0) -> Tensor:
    return torch.randn(2, 2 * per_head, 1, width, generator=torch.Generator().manual_seed(width)) * factor


@pytest.mark.parametrize(
    ("tokens", "width", "per_head"),
    [
        (1, 16, 1),
        (2, 64, 2),
        (33, 128, 4),
        (34, 6, 3),
        (66, 40, 6),
        (130, 80, 1),
        (600, 64, 3),
        (1100, 128, 4),
        (545, 100, 9),
        (70, 300, 2),
    ],
)
def test_attention_is_exact_within_the_bound(path: str, fmt: KVFormat, tokens: int, width: int, per_head: int) -> None:
    cache, q = filled(fmt, tokens, width), queries(width, per_head)
    expected, allowed = exact(cache, q), bound(cache, q, path)
    assert cache.tokens == tokens
    assert ((cache.attend(q).double() - expected).abs() <= allowed).all()
    assert allowed.max() < 0.02 * expected.abs().max(), "the bound is so wide that it says nothing"


@pytest.mark.parametrize(("keys", "query"), [(1.0, 300.0), (1e-6, 1.0), (3e3, 1e-3), (0.0, 1.0)])
def test_extreme_scores_and_scales_stay_within_the_bound(path: str, fmt: KVFormat, keys: float, query: float) -> None:
    """Scores of thousands; scales that are subnormal in float16, and large ones; scores that are all equal."""
    cache, q = filled(fmt, 200, 64, keys), queries(64, 4, query)
    assert ((cache.attend(q).double() - exact(cache, q)).abs() <= bound(cache, q, path)).all()


def test_every_code_is_read_as_it_is(path: str) -> None:
    """One query that picks one token, for every token of some groups: a code read from the wrong place or sign shows in full."""
    for fmt in FORMATS.values():
        cache, keys, values = PackedCache(fmt, 1, 1, 96), torch.zeros(1, 1, 96, 96), torch.randn(1, 1, 96, 96)
        keys[0, 0] = 40 * torch.eye(96)
        cache.append(keys, values)
        _, stored = cache.unpacked()
        for token in range(96):
            q = 20 * keys[:, :, token : token + 1]
            off = (cache.attend(q).double() - stored[:, :, token : token + 1].double()).abs()
            assert (off <= bound(cache, q, path) + math.exp(-40)).all(), (fmt.name, token)  # the others weigh e**-81 each, or less


@pytest.mark.parametrize("threads", [2, 7])
def test_threads_change_no_byte(path: str, fmt: KVFormat, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q = filled(fmt, 1100, 64), queries(64, 3)  # 3 parts of 4 heads, enough codes for eight shares
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = cache.attend(q)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for _ in range(5):
        assert cache.attend(q).numpy().tobytes() == alone.numpy().tobytes()
    assert path


@pytest.mark.parametrize("tokens", [1, 20, 600])
def test_a_query_that_is_not_finite_gives_nan_and_leaves_others_alone(path: str, tokens: int) -> None:
    for what in (math.nan, math.inf):
        cache, q = filled(kv.get("int8"), tokens, 64), queries(64, 4)
        before = cache.attend(q)
        q[0, 2, 0, 5] = what
        after = cache.attend(q)
        assert after[0, 2].isnan().all(), path
        others = [head for head in range(8) if head != 2]
        # those beside it may be computed another way than before, as exactly
        assert ((after[0, others] - before[0, others]).abs() <= 2 * bound(cache, queries(64, 4), path)[0, others]).all()
        assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("tokens", [3, 100])
def test_a_cached_value_that_is_not_finite_is_not_hidden(path: str, tokens: int) -> None:
    keys, values = states(tokens, 64, 0), states(tokens, 64, 1)
    values[1, 0, 2, 7] = math.nan
    cache = PackedCache(kv.get("int4"), 2, 2, 64)
    cache.append(keys, values)
    found = cache.attend(queries(64, 2)).isnan()
    assert found[1, :2, 0, 7].all(), path
    assert not found[0].any() and not found[1, 2:].any()


def test_what_is_packed_is_what_the_imitation_hands_to_attention(fmt: KVFormat) -> None:
    keys, values = states(140, 40, 0), states(140, 40, 1)
    imitated, packed = EmulatedKVCache(fmt), PackedCache(fmt, 2, 2, 40)
    if fmt.group > 1:  # all at once: attention reads its own piece in float, so what is compared is what the next one reads
        imitated.update(keys[:, :, :70], values[:, :, :70], 0)
        packed.append(keys[:, :, :70], values[:, :, :70])
        assert all(
            torch.equal(ours, his)
            for ours, his in zip(packed.unpacked(), (imitated.layers[0].keys, imitated.layers[0].values), strict=True)
        )
    for t in range(packed.tokens, 140):
        read = imitated.update(keys[:, :, t : t + 1], values[:, :, t : t + 1], 0)
        packed.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
        if t % 9 == 0 or fmt.rounded_after(t) != fmt.rounded_after(t - 1) or fmt.rounded_after(t + 1) != fmt.rounded_after(t):
            assert all(torch.equal(ours, his) for ours, his in zip(packed.unpacked(), read, strict=True)), t
    assert packed.tokens == 140


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 33, 200])
def test_it_weighs_what_the_format_says(name: str, tokens: int) -> None:
    cache = PackedCache(kv.get(name), 2, 2, 64)
    cache.append(states(tokens, 64, 0), states(tokens, 64, 1))
    in_float = 2 * 2 * 64 * cache.rest  # kv.py counts 16 bits for what is not rounded, here it has 32
    assert cache.nbytes == 4 * (kv.get(name).head_bytes(64, tokens) + in_float)


def test_without_native_kernels_torch_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBITS_KERNEL", "reference")
    cache, q = filled(kv.get("int4"), 100, 64), queries(64, 3)
    torch.testing.assert_close(cache.attend(q).double(), exact(cache, q), rtol=0, atol=float(bound(cache, q, "scalar").max()))


def test_the_environment_forces_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, isa in (("reference", None), ("scalar", "scalar")):
        monkeypatch.setenv("FEWBITS_KERNEL", wanted)
        assert attention._isa() == isa
    monkeypatch.delenv("FEWBITS_KERNEL")
    assert attention._isa() == processor.native().attention_isas()[0]


def test_what_cannot_be_kept_packed_is_refused() -> None:
    reasons = {"fp8": "not integers", "float": "not integers", "groups of 64": "64 tokens", "runs of 30": "multiple of 4"}
    odd = {"groups of 64": replace(kv.get("int4"), group=64), "runs of 30": replace(kv.get("int8"), channels=30)}
    for name, reason in reasons.items():
        with pytest.raises(InputError, match=reason):
            PackedCache(odd.get(name) or kv.get(name), 1, 1, 64)
    cache = PackedCache(kv.get("int8"), 1, 2, 64)
    with pytest.raises(InputError, match="nothing to read"):
        cache.attend(torch.zeros(1, 2, 1, 64))
    with pytest.raises(InputError, match="do not belong into this cache"):
        cache.append(torch.zeros(1, 2, 5, 32), torch.zeros(1, 2, 5, 32))
    cache.append(torch.zeros(1, 2, 5, 64), torch.zeros(1, 2, 5, 64))
    with pytest.raises(InputError, match="do not belong to this cache"):
        cache.attend(torch.zeros(1, 3, 1, 64))
