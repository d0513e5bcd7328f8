"""Experts recorded in several passes through a block, and what those that saw few tokens borrow from their layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mixtures import MIXTURES, experts_of, samples_of, save_all
from torch import Tensor

from fewbits import calibration, embedded, formats, kernels, methods, model
from fewbits.benchmarks.synthetic_llama import Shape, write_checkpoint
from fewbits.calibration import pooled, text
from fewbits.calibration.collector import Collector
from fewbits.calibration.passes import nbytes, passes
from fewbits.calibration.triangles import pack
from fewbits.model import Model
from fewbits.model.blocks import Blocks
from fewbits.model.weights import Weight
from fewbits.store.cache import Cache
from fewbits.store.mapped import Room


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_all(tmp_path_factory)


@pytest.fixture(scope="module")
def windows(embedded_model: Model) -> list[list[int]]:
    return text.windows.windows(embedded.calibration_text(), embedded_model.tokenizer, 24)[:6]


def stacked(experts: int, cols: int) -> list[Weight]:
    names = [("gate_up_proj", (2 * cols, cols)), ("down_proj", (cols, cols))]
    inside = [Weight(f"b.0.experts.{n}.{e}", shape, "mlp", "fp32", expert=e) for n, shape in names for e in range(experts)]
    return [Weight("b.0.q_proj", (cols, cols), "attention", "fp32"), *inside]


def test_sums_of_a_pass_fit_the_limit_and_an_expert_stays_whole() -> None:
    weights = stacked(12, 64)
    expert = sum(nbytes(weight) for weight in weights if weight.expert == 0)
    groups = passes(weights, nbytes(weights[0]) + 5 * expert)
    assert sorted(weight.name for group in groups for weight in group) == sorted(weight.name for weight in weights)
    assert [len({weight.expert for weight in group if weight.expert is not None}) for group in groups] == [5, 5, 2]
    assert all(sum(weight.expert == e for weight in group) == 2 for group in groups for e in {w.expert for w in group} - {None})
    assert len(passes(weights, None)) == 1 and len(passes(weights, 1)) == 13  # one expert at least, however little room there is


@pytest.mark.parametrize("name", list(MIXTURES))
def test_passes_make_the_statistics_of_one(name: str, folders: dict[str, Path], windows: list[list[int]], tmp_path: Path) -> None:
    source = model.open(folders[name])
    one = calibration.collect(source, samples_of(windows), tmp_path / "one")
    room = 2 * 3 * max(nbytes(weight) for weight in source.weights if weight.expert is not None)
    several = calibration.collect(source, samples_of(windows), tmp_path / "several", memory=room)
    assert (several.folder / "input-00000-1.safetensors").is_file() and not (one.folder / "input-00000-1.safetensors").exists()
    for weight in experts_of(source):
        for alone in (True, False):
            ours, theirs = several.of(weight.name, alone), one.of(weight.name, alone)
            assert (ours.share, ours.borrowed) == (theirs.share, theirs.borrowed)
            if theirs.input is None:
                assert ours.input is None
                continue
            for field in ("sensitivity", "gradient_square", "fisher_square", "fisher", "outputs"):
                assert torch.equal(getattr(ours, field), getattr(theirs, field)), (weight.name, field)
            assert ours.input is not None and torch.equal(ours.input.moment, theirs.input.moment)
            assert torch.equal(ours.input.count, theirs.input.count) and torch.equal(ours.input.first, theirs.input.first)


def test_later_passes_multiply_with_no_other_expert(folders: dict[str, Path], windows: list[list[int]], tmp_path: Path) -> None:
    source = model.open(folders["qwen3_moe"])
    blocks, loaded = Blocks(source, memory=0), []  # no room for experts: each is loaded for its products
    load = source.load
    source.load = lambda weight: (loaded.append(weight.expert), load(weight))[1]  # type: ignore[method-assign]
    room = Room(tmp_path, 2 * sum(nbytes(weight) for weight in blocks.weights(0) if weight.expert in (None, 0)))
    collector = Collector(blocks, windows, room, Cache(tmp_path / "cache"), hessians=True, gradients=False)
    loaded.clear()
    assert next(iter(collector.forward(lambda items, *_: iter(items))))[:2] == (0, "")  # one expert in each of four passes
    times = [loaded.count(expert) for expert in range(4)]
    matrices, batches = 2, 2  # a batch for each half of the samples
    assert times[0] <= matrices * batches and all(times[expert] <= 2 * matrices * batches for expert in (1, 2, 3)) and sum(times) > 16


def fields_of(x: list[Tensor]) -> dict[str, Tensor]:
    """Of an expert that read these tokens, in two halves."""
    cols = x[0].shape[1]
    return {
        "count": torch.tensor([len(half) for half in x]),
        "total": torch.stack([half.double().sum(0) for half in x]),
        "square": torch.stack([half.double().square().sum(0) for half in x]),
        "moment": pack(torch.stack([half.T @ half for half in x])),
        "first": torch.empty(0, cols),
    }


def made(spread: float, tokens: int) -> list[dict[str, Tensor]]:
    """Experts whose inputs have second moments that differ by `spread`: 0, they read the same."""
    draw, cols = torch.Generator().manual_seed(1), 32
    mixing = torch.randn(cols, cols, generator=draw)
    seen = []
    for _ in range(16):
        own = mixing + spread * torch.randn(cols, cols, generator=draw)
        seen.append(fields_of([torch.randn(tokens, cols, generator=draw) @ own for _ in range(2)]))
    return seen


def strength(seen: list[dict[str, Tensor]]) -> int:
    pool = {key: torch.stack([fields[key] for fields in seen]).sum(0) for key in ("count", "total", "square", "moment")}
    return pooled.strength(seen, pool)


def test_as_much_is_borrowed_as_the_other_half_of_the_samples_says() -> None:
    assert strength(made(0, 20)) > 1000  # all read the same: only the layer counts
    assert strength(made(3, 20)) < 200  # each has a world of its own
    assert strength(made(3, 2000)) < 0.2 * 2000


def test_borrowed_statistics_are_nearer_to_the_truth() -> None:
    """Of experts that are somewhat alike, judged by the moments that they were drawn from."""
    few, draw = made(0.7, 12), torch.Generator().manual_seed(1)
    mixing = torch.randn(32, 32, generator=draw)
    pool = {key: torch.stack([fields[key] for fields in few]).sum(0) for key in ("count", "total", "square", "moment")}
    alone = lent = 0.0
    for fields in few:
        own = mixing + 0.7 * torch.randn(32, 32, generator=draw)
        torch.randn(2 * 12, 32, generator=draw)  # the tokens, as `made` drew them
        truth = pack(torch.stack([own.T @ own] * 2))[0]
        mixed = pooled.lent(fields, pool, strength(few), pool["count"])
        alone += float((fields["moment"].sum(0) / 24 - truth).norm())
        lent += float((mixed["moment"].sum(0) / int(mixed["count"].sum()) - truth).norm())
    assert lent < 0.9 * alone


def test_an_expert_that_borrows_is_rounded_better_for_text_that_it_did_not_see(tmp_path: Path) -> None:
    """32 experts, 512 tokens: some are given three. What `auto` makes of them is judged by the tokens of another, longer text."""
    write_checkpoint(tmp_path / "model", Shape(1, 256, 128, 2048, experts=32))
    source = model.open(tmp_path / "model")
    few, many = (
        calibration.collect(source, calibration.draw(source, (), samples, 128, seed), tmp_path / str(samples))
        for samples, seed in ((4, 0), (60, 7))
    )
    fmt, damage = formats.get("q4_0"), {"alone": 0.0, "borrowed": 0.0, "plain": 0.0}
    for weight in source.weights:
        if weight.expert is None or weight.expert % 3 or "gate_up" not in weight.name:
            continue
        w, judge = source.load(weight), many.of(weight.name, alone=True)
        for how in damage:
            known = None if how == "plain" else few.of(weight.name, alone=how == "alone")
            made = methods.get("auto").quantize(w, fmt, known)
            damage[how] += judge.damage(kernels.decode(fmt, made.parts, weight.shape) - w, w)
    assert damage["borrowed"] < 0.85 * damage["alone"] and damage["borrowed"] < 0.85 * damage["plain"], damage
