"""How the benchmarks of quality make the peer's files and compare; what their figures say is in tests/calibration and tests/pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import needs_llama_cpp

from fewbits import embedded
from fewbits.benchmarks.peers import ggml
from fewbits.benchmarks.quality.contest import Texts, found, ggml_blocks
from fewbits.benchmarks.quality.plans import plans
from fewbits.benchmarks.quality.same_bytes import overrides_for
from fewbits.errors import InputError
from fewbits.model.weights import Weight
from fewbits.verification.metrics import MeasuredLogits

needs_ggml = needs_llama_cpp  # it is inside the same package


def _seen(mean_square: torch.Tensor | None) -> Any:
    seen = None if mean_square is None else SimpleNamespace(mean_square=lambda: mean_square)
    return SimpleNamespace(of=lambda _name: SimpleNamespace(input=seen))


def _weight(name: str, cols: int) -> Weight:
    return Weight(name, (64, cols), "linear", "fp32")


@needs_ggml
@pytest.mark.parametrize("fmt", ["q4_0", "iq3_s", "iq2_xxs", "iq1_m"])
def test_the_peer_rounds_the_same_with_any_number_of_threads(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.Generator().manual_seed(0)
    w, importance = torch.randn(7, 512, generator=drawn), torch.rand(512, generator=drawn)
    expected = ggml.quantize(ggml.SPELLED[fmt], w.numpy(), importance.numpy())
    for threads in (1, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert np.array_equal(ggml_blocks(w, fmt, _seen(importance), _weight("w", 512)).numpy(), expected)


@needs_ggml
def test_an_embedding_has_an_importance_only_where_ggml_needs_one() -> None:
    w, table = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)), _weight("embedding", 256)
    for name in ("iq2_xxs", "iq2_xs", "iq1_s"):
        flat = ggml.quantize(name, w.numpy(), np.ones(256, np.float32))
        assert ggml.needs_importance(name) and np.array_equal(ggml_blocks(w, name, _seen(None), table).numpy(), flat)
    for name in ("iq3_s", "q2_K"):
        plain = ggml.quantize(name, w.numpy(), None)
        assert not ggml.needs_importance(name) and np.array_equal(ggml_blocks(w, name.lower(), _seen(None), table).numpy(), plain)


def test_uneven_columns_get_what_llama_quantize_gives_them() -> None:
    weights = [_weight("layers.1.o_proj", 576), _weight("layers.11.o_proj", 576), _weight("q_proj", 768), _weight("odd", 40)]
    assert overrides_for("iq2_xxs", weights) == [r"^layers\.1\.o_proj$=iq4_nl", r"^layers\.11\.o_proj$=iq4_nl"]
    assert overrides_for("q3_k", weights)[0] == r"^layers\.1\.o_proj$=q4_0" and overrides_for("q4_0", weights) == []


def test_figures_are_paired_with_the_peer_where_there_is_one() -> None:
    ours = MeasuredLogits(kl=[0.1] * 8, nll=[2.0] * 8, nll_base=[1.9] * 8, agrees=[True] * 6 + [False] * 2)
    peer = MeasuredLogits(kl=[0.4] * 8, nll=[2.2] * 8, nll_base=[1.9] * 8, agrees=[True] * 4 + [False] * 4)
    alone, beside = found(ours, None), found(ours, peer)
    assert alone.to_peer is None and alone.kl == beside.kl == pytest.approx(0.1) and beside.to_peer is not None
    assert beside.to_peer.kl_ratio == pytest.approx(0.25) and beside.to_peer.top1_gain == pytest.approx(0.25)


def test_a_size_in_bytes_is_no_mix(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"2MB"):
        plans(embedded.MODEL, tmp_path / "out", Texts(), ["iq4_xs", "2MB"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@needs_llama_cpp
def test_a_size_in_bits_stands_beside_mixes_and_ours_are_made_again(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    formats = ("--formats", "q2_k,q4_k,q6_k", "--mixes", "q2_k,3bpw", "--brief")
    asked = ("bench", "plans", embedded.MODEL, "-o", tmp_path / "b", "--samples", 4, "--tokens", 511, "--json", *formats)
    code, by_workers, err = run(*asked[:4], tmp_path / "a", *asked[5:], "--executor", "local:2")
    assert code == 0, err
    code, out, err = run(*asked)
    assert code == 0 and json.loads(out) == json.loads(by_workers), err
    rows = {(row["mix"], row["maker"]): row for row in json.loads(out)["texts"][0]["rows"]}
    assert rows.keys() == {("q2_k", "ggml + imatrix"), ("q2_k", "fewbits"), ("3bpw", "fewbits")}
    assert rows["3bpw", "fewbits"]["found"]["to_peer"] is None and rows["3bpw", "fewbits"]["bits_per_weight"] <= 3
    assert rows["q2_k", "fewbits"]["bytes"] <= rows["q2_k", "ggml + imatrix"]["bytes"]
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "b").rglob("*") if "measured" in file.parts and file.is_file()}
    code, again, err = run(*asked, "--remake")
    assert code == 0 and json.loads(again) == json.loads(out), err
    remade = {file.parent.name for file, ns in times.items() if file.stat().st_mtime_ns != ns}
    assert remade == {"q2_k fewbits", "3bpw fewbits"}
