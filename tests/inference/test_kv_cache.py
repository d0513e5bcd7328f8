from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fewbits import embedded, model
from fewbits.calibration.text import windows
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.formats.runtime.kv import KVFormat
from fewbits.inference.emulated_kv_cache import EmulatedKVCache
from fewbits.progress import silent
from fewbits.verification.kv import cache_costs
from fewbits.verification.runtimes import torch as torch_runtime

FORMATS = list(kv.all().values())
ROUNDED = [fmt for fmt in FORMATS if fmt.levels]
CONFIG = SimpleNamespace(num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, hidden_size=384, head_dim=64)


def states(tokens: int, width: int = 40, seed: int = 0) -> Tensor:  # (1, 2 heads, tokens, width), with loud channels and a loud first token
    x = torch.randn(1, 2, tokens, width, generator=torch.Generator().manual_seed(seed))
    x[..., 3] = 12 + x[..., 3]
    x[..., 0, :] *= 9
    return x


def slow_rounded(values: list[float], fmt: KVFormat) -> list[float]:
    """One group under one scale, value by value: the nearest of all that its codes can say, scale and minimum as float16."""
    assert fmt.levels
    half = lambda x: float(torch.tensor(x, dtype=torch.float32).half())  # noqa: E731
    low = half(min(values)) if fmt.minimum else 0.0
    spread = max(values) - min(values) if fmt.minimum else max(abs(v) for v in values)
    scale = half(spread / (fmt.levels[-1] if fmt.minimum else fmt.largest))
    finite = [level for level in fmt.levels if level == level]
    return [low + scale * min(finite, key=lambda level: abs(low + scale * level - v)) for v in values]


def slow_cache(x: Tensor, fmt: KVFormat, per_channel: bool) -> Tensor:
    """What is read back of one head's (tokens, width) after all of it has arrived, in loops."""
    out = x.clone()
    tokens, width = x.shape
    for start in range(fmt.sink, tokens - fmt.group + 1, fmt.group):
        if per_channel:
            for c in range(width):
                out[start : start + fmt.group, c] = torch.tensor(slow_rounded(x[start : start + fmt.group, c].tolist(), fmt))
        else:
            for t in range(start, start + fmt.group):
                for c in range(0, width, fmt.channels or width):
                    out[t, c : c + (fmt.channels or width)] = torch.tensor(
                        slow_rounded(x[t, c : c + (fmt.channels or width)].tolist(), fmt)
                    )
    return out


@pytest.mark.parametrize(
    "fmt", [*ROUNDED, replace(kv.get("int4"), channels=16), replace(kv.get("fp8"), channels=16, sink=2)], ids=lambda f: f.name
)
def test_what_is_read_back_equals_the_slow_twin(fmt: KVFormat) -> None:
    keys, values = states(70), states(70, seed=1)
    values[0, 0, 40] = 0.0  # a token of nothing
    cache = EmulatedKVCache(fmt)
    cache.update(keys, values, 0)
    for ours, x, per_channel in ((cache.layers[0].keys, keys, fmt.keys == "channel"), (cache.layers[0].values, values, False)):
        for head in range(2):
            twin = slow_cache(x[0, head], fmt, per_channel)
            # where two codes are as near to each other as the float32 arithmetic between can tell, either is right
            differ = (ours[0, head] - twin).abs() > 1e-6 * x.abs().max()
            error, best = (ours[0, head] - x[0, head]).abs(), (twin - x[0, head]).abs()
            assert (error <= best + 1e-6 * x.abs().max()).all()
            assert differ.float().mean() < 1e-3
            assert (twin != x[0, head]).any()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_a_token_at_a_time_and_a_piece_at_a_time_fill_the_same_cache(fmt: KVFormat) -> None:
    keys, values = states(101), states(101, seed=1)
    single, pieces = EmulatedKVCache(fmt), EmulatedKVCache(fmt)
    for t in range(101):
        single.update(keys[:, :, t : t + 1], values[:, :, t : t + 1], 0)
    for piece in fmt.pieces(list(range(101))):
        now = slice(piece[0], piece[-1] + 1)
        pieces.update(keys[:, :, now], values[:, :, now], 0)
    assert torch.equal(single.layers[0].keys, pieces.layers[0].keys)
    assert torch.equal(single.layers[0].values, pieces.layers[0].values)
    assert single.get_seq_length() == 101


@pytest.mark.parametrize("fmt", ROUNDED, ids=lambda f: f.name)
def test_attention_reads_complete_groups_rounded_and_the_rest_in_float(fmt: KVFormat) -> None:
    keys, values = states(80), states(80, seed=1)
    cache = EmulatedKVCache(fmt)
    for t in range(80):
        read_keys, read_values = cache.update(keys[:, :, t : t + 1], values[:, :, t : t + 1], 0)
        complete = t + 1 if fmt.group == 1 else fmt.rounded_after(t)  # its own group is in float even when it is the last of it
        for read, x in ((read_keys, keys), (read_values, values)):
            assert read.shape[-2] == t + 1
            is_float = (read == x[..., : t + 1, :]).all(-1).all(1)[0]  # by token
            assert is_float[: fmt.sink].all() and is_float[max(complete, fmt.sink) :].all()
            assert not is_float[fmt.sink : complete].any()


def test_pieces_cut_where_groups_end_and_lose_nothing() -> None:
    fmt = replace(kv.get("int4"), group=32, sink=1)
    assert [len(piece) for piece in fmt.pieces(list(range(100)))] == [33, 32, 32, 3]
    for length in (1, 32, 33, 34, 65, 66):
        tokens = list(range(length))
        pieces = fmt.pieces(tokens)
        assert [token for piece in pieces for token in piece] == tokens and all(pieces)
        for piece in pieces[:-1]:
            assert fmt.rounded_after(piece[-1] + 1) == piece[-1] + 1


@pytest.fixture(scope="module")
def loaded(embedded_model: model.Model) -> tuple[torch.nn.Module, list[int]]:
    return embedded_model.module(), windows.windows(embedded.verification_text(), embedded_model.tokenizer, 150)[0]


def test_a_float_cache_changes_nothing_at_all(loaded: tuple[torch.nn.Module, list[int]]) -> None:
    module, tokens = loaded
    assert torch.equal(torch_runtime.of_module(module, kv="float").logits(tokens), torch_runtime.of_module(module).logits(tokens))


def test_pieces_alone_change_no_more_than_the_order_of_sums(loaded: tuple[torch.nn.Module, list[int]], monkeypatch) -> None:
    module, tokens = loaded
    plain = torch_runtime.of_module(module).logits(tokens)
    monkeypatch.setattr(kv, "FORMATS", (replace(kv.get("float"), group=32, sink=1),))
    piecewise = torch_runtime.of_module(module, kv="float").logits(tokens)
    # float32 sums of up to 768 terms in four layers, in another order; a wrong position or mask moves logits by whole units
    torch.testing.assert_close(piecewise, plain, rtol=0, atol=768 * 2**-23 * float(plain.abs().max()))


def test_a_sliding_window_is_masked_as_without_a_cache(monkeypatch) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        vocab_size=64, sliding_window=20, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    module = Gemma2ForCausalLM(config)
    tokens = torch.randint(0, 64, (100,)).tolist()
    plain = torch_runtime.of_module(module).logits(tokens)
    assert torch.equal(torch_runtime.of_module(module, kv="float").logits(tokens), plain)
    monkeypatch.setattr(kv, "FORMATS", (replace(kv.get("float"), group=32, sink=1),))
    piecewise = torch_runtime.of_module(module, kv="float").logits(tokens)
    torch.testing.assert_close(piecewise, plain, rtol=0, atol=64 * 2**-23 * float(plain.abs().max()))


def test_a_model_whose_layers_keep_no_keys_is_refused(embedded_model: model.Model) -> None:
    module = embedded_model.module()
    module.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(InputError, match="linear_attention"):
        torch_runtime.of_module(module, kv="int8")
    module.config.layer_types = None


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_a_rounded_cache_moves_logits_a_little(name: str, loaded: tuple[torch.nn.Module, list[int]]) -> None:
    module, tokens = loaded
    plain, rounded = torch_runtime.of_module(module).logits(tokens), torch_runtime.of_module(module, kv=name).logits(tokens)
    error = float((rounded - plain).pow(2).mean().sqrt() / plain.std())
    step = {"int8": 1 / 255, "int4": 1 / 15, "fp8": 1 / 8}[name]  # of a value, relative to its range or to itself
    assert step / 1000 < error < step
    fmt = kv.get(name)
    if fmt.group > 1:  # until the first group is complete there is nothing to read rounded
        first = fmt.sink + fmt.group
        untouched = torch_runtime.of_module(module).logits(tokens[:first])
        assert torch.equal(torch_runtime.of_module(module, kv=name).logits(tokens)[:first], untouched)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_no_token_sees_a_later_one(name: str, loaded: tuple[torch.nn.Module, list[int]]) -> None:
    module, tokens = loaded
    session = torch_runtime.of_module(module, kv=name)
    other = [*tokens[:100], *(5 for _ in tokens[100:])]
    before, after = session.logits(tokens), session.logits(other)
    assert torch.equal(before[:100], after[:100])
    assert not torch.equal(before[100:], after[100:])


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_logits_equal_those_of_a_token_at_a_time(name: str, loaded: tuple[torch.nn.Module, list[int]]) -> None:
    """What the session computes in pieces is what a decoder would get, step by step."""
    module, tokens = loaded
    tokens = tokens[:80]
    whole = torch_runtime.of_module(module, kv=name).logits(tokens)
    cache = EmulatedKVCache(kv.get(name))
    with torch.inference_mode():
        steps = torch.cat([module(input_ids=torch.tensor([[t]]), past_key_values=cache, use_cache=True).logits[0] for t in tokens])
    # sums in another order may tip a code: that is one step of one value among thousands, far below the effect of the rounding
    rounding = (whole - torch_runtime.of_module(module).logits(tokens)).pow(2).mean()
    assert (whole - steps).pow(2).mean() < 0.01 * rounding


def test_bytes_are_those_of_the_arrays_that_a_cache_would_hold() -> None:
    for fmt in ROUNDED:
        for width in (64, 40, 33):
            for tokens in (0, 1, 20, 33, 64, 97, 1000):
                rounded = max(0, fmt.rounded_after(tokens) - fmt.sink)
                scales = 2 if fmt.minimum else 1
                bits = 0
                for _ in range(rounded):  # values: codes to a whole byte, and float16 scales
                    bits += -(-width * fmt.bits // 8) * 8 + 16 * scales * len(range(0, width, fmt.channels or width))
                for _ in range(rounded):
                    bits += -(-width * fmt.bits // 8) * 8
                    bits += 16 * scales * len(range(0, width, fmt.channels or width)) if fmt.keys == "token" else 0
                if fmt.keys == "channel":
                    bits += rounded // fmt.group * width * 16 * scales
                bits += (tokens - rounded) * width * 2 * 16
                assert fmt.head_bytes(width, tokens) * 8 == bits


def test_prices() -> None:
    assert kv.nbytes(CONFIG, kv.get("float"), 100) == 3 * 2 * 2 * 64 * 100 * 2
    assert kv.bits_per_value(CONFIG, kv.get("float")) == 16
    assert kv.bits_per_value(CONFIG, kv.get("fp8")) == 8 + 16 / 64
    assert kv.bits_per_value(CONFIG, kv.get("int8")) == 8 + (32 / 32 + 32 / 64) / 2
    assert kv.bits_per_value(CONFIG, kv.get("int4")) == 4 + (32 / 32 + 32 / 64) / 2
    assert kv.bits_per_value(CONFIG, kv.get("int4"), 10) == 16  # nothing complete yet
    long = kv.bits_per_value(CONFIG, kv.get("int4"), 100_000)
    assert kv.bits_per_value(CONFIG, kv.get("int4")) < long < 1.01 * kv.bits_per_value(CONFIG, kv.get("int4"))
    gpt2 = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=128)
    assert kv.nbytes(gpt2, kv.get("float"), 1) == 2 * 4 * 2 * 32 * 2


def test_an_unknown_format_is_refused_with_a_hint() -> None:
    assert kv.get("INT4").name == "int4"
    with pytest.raises(InputError, match="no KV cache format is named `int5`") as refused:
        kv.get("int5")
    assert "did you mean" in refused.value.hint
    with pytest.raises(InputError) as refused:
        kv.get("zzz")
    assert all(fmt.name in refused.value.hint for fmt in FORMATS)


def test_measure_gives_what_each_length_alone_would(embedded_model: model.Model) -> None:
    held_out = windows.windows(embedded.verification_text(), embedded_model.tokenizer, 160, 500)
    both = {(row.format, row.length): row for row in cache_costs(embedded_model, ["int8", "int4"], [80, 160], held_out, silent)}
    short = cache_costs(embedded_model, ["int4"], [80], held_out, silent)[0]
    assert short.tokens == both["int4", 80].tokens == 79 * len(held_out)
    # longer windows sum in another order: logits move by about 1e-5, where the cache moves them by 1e-2
    assert short.kl == pytest.approx(both["int4", 80].kl, rel=2e-3)
    assert short.ppl_ratio == pytest.approx(both["int4", 80].ppl_ratio, rel=1e-5)
    assert 0 < both["int8", 160].kl < both["int4", 160].kl
    assert both["int4", 160].kl_ci95[0] <= both["int4", 160].kl <= both["int4", 160].kl_ci95[1]
    with pytest.raises(InputError, match="no windows of 320"):
        cache_costs(embedded_model, ["int8"], [320], held_out, silent)


def test_formats_and_activations_load_no_torch() -> None:
    code = "import sys; import fewbits.planning; from fewbits.formats.runtime import activations, kv; kv.get('int4')"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
