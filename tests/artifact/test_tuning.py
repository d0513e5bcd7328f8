"""Tuning of scales: gradients and divergences against the whole model in one autograd graph, run by transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fewbits import artifact, embedded, formats, kernels, methods, model, planning, targets
from fewbits.artifact.tuned import tuned_outcomes
from fewbits.formats.storage.codes import decode, encode
from fewbits.methods import Outcome, tuned_scales
from fewbits.methods.tuned_scales import Quantized, Tuned, minibatches, tune
from fewbits.methods.tuned_scales.scales import Scales
from fewbits.methods.tuned_scales.student import Student
from fewbits.model import Model
from fewbits.model.blocks import Blocks
from fewbits.model.walk import Batch, Walk
from fewbits.planning import Plan
from fewbits.progress import silent
from fewbits.store.cache import Cache
from fewbits.store.mapped import Room

if TYPE_CHECKING:
    from fewbits.formats import Grid

# one of each family of grids: a scale per block, with a minimum, under integers, with minima under integers, beside integer zeros, per
# row in float32, for the whole weight
FAMILIES = ("q4_0", "q4_1", "iq4_xs", "q4_k", "q2_k", "int4_g32_asym", "fp8_e4m3_channel", "int4_tensor", "nvfp4_tensor")
LENGTH = 32
FEW = 0.005  # the rate of a few steps on a few tokens


@dataclass(frozen=True)
class Case:
    """A model with samples of tokens."""

    model: Model
    samples: list[list[int]]

    @property
    def batches(self) -> list[Batch]:
        return minibatches(self.samples)

    def walk(self) -> Walk:
        return Walk(Blocks(self.model), self.batches, Room(Path("unused"), 1 << 30))

    def tune(self, quantized: dict[str, Quantized], **options: Any) -> Tuned:
        return tune(self.walk(), quantized, **options)

    def rounded(self, name: str) -> dict[str, Quantized]:
        """All weights that the format fits."""
        fmt = formats.get(name)
        rounded: dict[str, Quantized] = {}
        for weight in self.model.weights:
            if fmt.fits(weight.shape) is None:
                w = self.model.load(weight)
                grid = fmt.fit(w, how="max")
                rounded[weight.name] = (fmt, fmt.encode(w, grid), grid)
        return rounded

    def divergence(self, quantized: Mapping[str, Quantized], grids: Mapping[str, Grid], ids: Tensor) -> Tensor:
        """The slow twin: decoding, the whole model and its divergence in one graph. -> (samples, length)"""
        module, inside = self.model.module(), dict[str, Tensor]()
        for weight in self.model.weights:
            if weight.name in quantized:
                fmt, codes, _ = quantized[weight.name]
                assert fmt.levels
                w = decode(codes, fmt.levels, *fmt.affine(grids[weight.name]))
                inside[weight.parameter] = w.T if weight.transposed else w
        with torch.no_grad():
            wanted = module(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        given = functional_call(module, inside, (), {"input_ids": ids, "use_cache": False}).logits.log_softmax(-1)
        return (wanted.exp() * (wanted - given)).sum(-1)


def case(source: Model, count: int = 12) -> Case:
    ids = source.tokenizer(embedded.calibration_text()[:20_000], verbose=False).input_ids
    return Case(source, [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(count)])


def starts(quantized: Mapping[str, Quantized]) -> dict[str, Grid]:
    return {name: grid for name, (_, _, grid) in quantized.items()}


@pytest.fixture(scope="module", autouse=True)
def small_steps() -> object:
    """Four minibatches and more of these short samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned_scales, "STEP_TOKENS", 2 * LENGTH)
        yield


@pytest.fixture(scope="module")
def trained(embedded_model: Model) -> Case:
    return case(embedded_model)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Random, of three blocks. GPT-2 stores its matrices transposed and has biases."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    made: torch.nn.Module
    if request.param == "gpt2":
        made = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=2048, n_positions=64, bos_token_id=0, eos_token_id=1))
    else:
        made = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=2048, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
            )
        )  # fmt: skip
    made.save_pretrained(folder)  # type: ignore[operator]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, folder / name)
    return model.open(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_floating_entry_has_the_gradient_of_its_decoded_values(name: str) -> None:
    torch.manual_seed(1)
    fmt, w, upstream = formats.get(name), torch.randn(4, 512) * 0.05, torch.randn(4, 512)
    assert fmt.levels
    grid = fmt.fit(w)
    codes = encode(w, fmt.levels, *fmt.affine(grid))
    scales = Scales(fmt, codes, grid)
    assert set(scales.changes) == {key for key, entry in grid.items() if entry.is_floating_point()} != set()
    scales.add_gradient(upstream)
    for key, change in scales.changes.items():
        # values are linear in an entry: without it, they lose just what its relative gradient says
        without = grid | {key: grid[key].clone()}
        without[key][-1, -1] = 0
        lost = (decode(codes, fmt.levels, *fmt.affine(grid)) - decode(codes, fmt.levels, *fmt.affine(without))) * upstream
        assert change.grad is not None
        bound = 2048 * torch.finfo(torch.float32).eps * float(lost.abs().sum())
        assert lost.abs().sum() > 0
        assert float(change.grad[-1, -1]) == pytest.approx(float(lost.double().sum()), abs=bound)


def test_the_gradient_equals_that_of_one_graph(small: Model) -> None:
    """Of every weight: those of blocks, the embedding that is looked up, the output matrix, and one matrix that is both."""
    seen = case(small, 4)
    quantized, batch = seen.rounded("q4_0"), seen.batches[0]
    assert set(quantized) == {weight.name for weight in small.weights}
    scales = {name: Scales(*weight) for name, weight in quantized.items()}
    Student(seen.walk(), scales).add_gradient(batch)
    leaves = {name: grid["d"].float().requires_grad_() for name, (_, _, grid) in quantized.items()}
    seen.divergence(quantized, {name: {"d": leaf} for name, leaf in leaves.items()}, batch.ids).mean().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        gradient, expected = scales[name].changes["d"].grad, leaf.grad * leaf.detach()
        assert gradient is not None
        # both sum the same few thousand float32 terms, in another order at most
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("name", FAMILIES)
def test_scales_move_and_nothing_else_does(trained: Case, name: str) -> None:
    quantized = trained.rounded(name)
    codes = {weight: codes.clone() for weight, (_, codes, _) in quantized.items()}
    grids = {weight: {key: entry.clone() for key, entry in grid.items()} for weight, grid in starts(quantized).items()}
    tuned = trained.tune(quantized, steps=12, rate=FEW)
    assert tuned.after is not None and tuned.before is not None and tuned.after < tuned.before
    assert any("were tuned" in note for note in tuned.notes)
    for weight, (_, now, given) in quantized.items():
        assert torch.equal(now, codes[weight])
        for key, entry in tuned.grids[weight].items():
            start = grids[weight][key]
            assert torch.equal(given[key], start)  # what was handed in is not written to
            assert (entry.dtype, entry.shape) == (start.dtype, start.shape)
            assert start.is_floating_point() or torch.equal(entry, start)
            assert not ((entry == 0) & (start != 0)).any()
    moved = [any(not torch.equal(entry, grids[weight][key]) for key, entry in grid.items()) for weight, grid in tuned.grids.items()]
    assert sum(moved) > 0.9 * len(moved)  # one float16 for a whole weight may stay where it is


def test_the_divergences_are_those_of_the_held_out_samples(trained: Case) -> None:
    quantized = trained.rounded("q4_0")
    tuned = trained.tune(quantized, steps=12)
    ids = torch.cat([batch.ids for batch in trained.batches[1::4]])
    for divergence, grids in ((tuned.before, starts(quantized)), (tuned.after, tuned.grids)):
        with torch.no_grad():
            expected = trained.divergence(quantized, grids, ids).double().mean()
        assert divergence == pytest.approx(float(expected), rel=1e-3)  # float32, in the same kernels


def test_held_out_samples_are_not_trained_on(trained: Case) -> None:
    tuned = trained.tune(trained.rounded("q4_0"), steps=12)
    held_out = {tuple(row) for batch in trained.batches[1::4] for row in batch.ids.tolist()}
    other = Case(trained.model, [[*s[:-1], s[0]] if tuple(s) in held_out else s for s in trained.samples])
    again = other.tune(other.rounded("q4_0"), steps=12)
    assert again.before != tuned.before
    for name, grid in tuned.grids.items():
        assert torch.equal(again.grids[name]["d"], grid["d"])


def test_a_run_that_was_stopped_goes_on_to_the_same_scales(trained: Case, tmp_path: Path) -> None:
    whole = trained.tune(trained.rounded("q4_0"), steps=14)

    def stopping(items: Iterator[Any], _: int, what: str) -> Iterator[Any]:
        for number, item in enumerate(items):
            if what == "tuning scales" and number == 12:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        trained.tune(trained.rounded("q4_0"), steps=14, cache=Cache(tmp_path), progress=stopping)
    seen: list[int] = []

    def counting(items: Iterator[Any], total: int, what: str) -> Iterator[Any]:
        seen.extend([total] * (what == "tuning scales"))
        return silent(items, total, what)

    again = trained.tune(trained.rounded("q4_0"), steps=14, cache=Cache(tmp_path), progress=counting)
    assert seen == [4]  # ten were kept
    assert (again.before, again.after) == (whole.before, whole.after)
    for name, grid in whole.grids.items():
        assert all(torch.equal(entry, again.grids[name][key]) for key, entry in grid.items())


def test_an_attempt_that_was_given_up_is_not_gone_on_with(trained: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the second attempt: the first one ended at step 10, and is looked at again where its state was kept."""
    steps: list[int] = []
    real = tuned_scales._Descent.step

    def counted(self: Any, add_gradient: Any) -> None:
        if len(steps) == 13:
            raise KeyboardInterrupt
        steps.append(self.done)
        real(self, add_gradient)

    monkeypatch.setattr(tuned_scales._Descent, "step", counted)
    with pytest.raises(KeyboardInterrupt):
        trained.tune(trained.rounded("q4_0"), steps=14, rate=2.0, cache=Cache(tmp_path))
    assert steps == [*range(10), *range(3)]
    steps.clear()
    with pytest.raises(KeyboardInterrupt):
        trained.tune(trained.rounded("q4_0"), steps=14, rate=2.0, cache=Cache(tmp_path))
    assert steps[:3] == [0, 1, 2]  # of the second attempt


def test_steps_are_in_proportion_to_the_rounding_error(trained: Case) -> None:
    quantized, walk = trained.rounded("fp8_e4m3_channel"), trained.walk()
    scales = {name: Scales(*weight) for name, weight in quantized.items()}
    student = Student(walk, scales)
    tuned_scales._Descent(walk, scales, steps=1, rate=0.02, cache=None).step(lambda: student.add_gradient(trained.batches[0]))
    inside = {weight.name for weight in trained.model.weights} - {weight.name for weight in walk.blocks.outer_weights}
    for weight in trained.model.weights:
        (fmt, codes, grid), w = quantized[weight.name], trained.model.load(weight)
        error = (fmt.decode(codes, grid) - w).norm() / w.norm()
        moved = scales[weight.name].changes["scales"].detach().abs()
        # Adam's first step is of the size of the rate, whatever the gradient; a row of the embedding that no token is has none
        close = (moved - 0.02 * error).abs() < 1e-3 * 0.02 * error
        assert (close | (moved == 0)).all() and close.any()
        assert weight.name not in inside or close.all()


def test_what_became_worse_is_given_up(trained: Case) -> None:
    quantized = trained.rounded("q4_0")
    tuned = trained.tune(quantized, steps=3, rate=5.0)
    assert tuned.after == tuned.before
    assert all(tuned.grids[name] is grid for name, grid in starts(quantized).items())
    assert tuned.notes[0].startswith("scales not tuned: the held-out KL")


def test_a_rate_that_makes_it_worse_is_lowered(trained: Case) -> None:
    quantized = trained.rounded("q4_0")
    too_fast, slower = (trained.tune(quantized, steps=12, rate=rate) for rate in (0.64, 0.04))
    assert too_fast.after == slower.after and slower.after is not None and slower.before is not None and slower.after < slower.before
    for name, grid in slower.grids.items():
        assert torch.equal(too_fast.grids[name]["d"], grid["d"])


def test_a_format_without_floating_scales_is_passed_through(trained: Case) -> None:
    quantized = trained.rounded("mxfp4")
    tuned = trained.tune(quantized, steps=3)
    assert all(tuned.grids[name] is grid for name, grid in starts(quantized).items())
    assert tuned.notes == ("scales of mxfp4 are not tuned: it has none in floating point",)


def test_one_minibatch_is_too_few(trained: Case) -> None:
    few = Case(trained.model, trained.samples[:1])
    tuned = few.tune(few.rounded("q4_0"), steps=3)
    assert "one minibatch only" in tuned.notes[0]


def test_a_bad_scale_is_repaired(trained: Case) -> None:
    good = trained.rounded("q4_0")
    bad, name = dict(good), "model.layers.1.mlp.up_proj"
    fmt, codes, grid = good[name]
    bad[name] = (fmt, codes, {"d": grid["d"] * 1.5})
    repaired = trained.tune(bad, steps=100)
    start = trained.tune(good, steps=1).before
    assert repaired.before is not None and repaired.after is not None and start is not None
    assert repaired.before > 1.5 * start
    # not the scales themselves: those of down_proj make up for those of up_proj just as well, and each goes part of the way
    assert repaired.after < 1.1 * start


Made = tuple[Model, Plan, dict[str, Outcome], dict[str, Outcome], Path]


@pytest.fixture(scope="module")
def tuned(small: Model, tmp_path_factory: pytest.TempPathFactory) -> Made:
    rule = r"1\..*(down_proj|mlp\.c_proj)=fp16"
    plan = planning.uniform(small.weights, targets.get("fewbits"), formats.get("q4_0"), [rule])
    before = {w.name: methods.get("rtn").quantize(small.load(w), formats.get(plan[w.name].format)) for w in small.weights}
    folder, samples = tmp_path_factory.mktemp("tuned"), case(small, 64).samples
    cache = Cache(folder / "cache")
    after = {w.name: outcome for w, outcome in tuned_outcomes(small, plan, samples, before, steps=40, memory=0, cache=cache)}
    again = tuned_outcomes(small, plan, samples, {}, steps=40, memory=0, cache=Cache(folder / "cache"))  # nothing is made anew
    artifact.write(small, plan, folder / "artifact", again)
    return small, plan, before, after, folder / "artifact"


def test_the_artifact_holds_the_tuned_values(tuned: Made) -> None:
    source, plan, before, after, path = tuned
    made = artifact.Artifact(path)
    assert set(after) == {weight.name for weight in source.weights}
    for weight in source.weights:
        fmt, outcome = formats.get(plan[weight.name].format), after[weight.name]
        codes, grid = fmt.unpack(outcome.parts)
        old_codes, old_grid = fmt.unpack(before[weight.name].parts)
        assert torch.equal(made.decoded(weight), decode(codes, fmt.levels, *fmt.affine(grid)))
        assert torch.equal(codes, old_codes)
        assert outcome.method == before[weight.name].method
        assert (outcome.parts is before[weight.name].parts) == fmt.is_cast
        assert fmt.is_cast or not torch.equal(grid["d"], old_grid["d"])
    (note,) = [note for outcome in after.values() for note in outcome.notes]
    assert "tuned together" in note


def test_samples_of_different_lengths_are_each_seen_once() -> None:
    samples = [list(range(n)) for n in (5, 3, 5, 200, 3, 5)]
    batches = minibatches(samples)
    assert [batch.where.start for batch in batches[1:]] == [batch.where.stop for batch in batches[:-1]]
    assert sorted(row.tolist() for batch in batches for row in batch.ids) == sorted(samples)
    assert all(batch.ids.numel() <= tuned_scales.STEP_TOKENS or len(batch.ids) == 1 for batch in batches)


def test_a_kernel_packs_tuned_grids_as_the_reference_does(trained: Case) -> None:
    for name in ("q4_k", "int4_g32_asym"):
        quantized = trained.rounded(name)
        tuned = trained.tune(quantized, steps=2)
        fmt, codes, _ = next(iter(quantized.values()))
        grid = tuned.grids[next(iter(quantized))]
        parts = kernels.pack(fmt, codes, grid)
        assert all(torch.equal(part, fmt.pack(codes, grid)[key]) for key, part in parts.items())
