"""Tuning of scales: gradients against one plain autograd graph, errors against the whole model run by transformers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from fewbits.model import Model
from fewbits.model.blocks import Blocks
from fewbits.model.walk import Batch, Walk
from fewbits.planning import Plan
from fewbits.store.mapped import Room

if TYPE_CHECKING:
    from fewbits.formats import Grid

# one of each family of grids: a scale per block, with a minimum, under integers, with minima under integers, beside integer zeros, per
# row in float32, for the whole weight
FAMILIES = ("q4_0", "q4_1", "iq4_xs", "q4_k", "q2_k", "int4_g32_asym", "fp8_e4m3_channel", "int4_tensor", "nvfp4_tensor")
BLOCK, LENGTH = 1, 32


@dataclass(frozen=True)
class Case:
    """A block of a model, with what it reads and gives as transformers itself says."""

    blocks: Blocks
    samples: list[list[int]]
    inputs: Tensor
    targets: Tensor

    @property
    def batches(self) -> list[Batch]:
        return minibatches(self.samples)

    def walk(self) -> Walk:
        walk = Walk(self.blocks, self.batches, Room(Path("unused"), 1 << 30))
        walk.enter()
        return walk

    def tune(self, quantized: dict[str, Quantized], **options: object) -> Tuned:
        return tune(self.walk(), BLOCK, quantized, self.inputs, self.targets, **options)  # type: ignore[arg-type]

    def rounded(self, name: str) -> dict[str, Quantized]:
        fmt = formats.get(name)
        assert fmt.levels
        rounded: dict[str, Quantized] = {}
        for weight in self.blocks.weights(BLOCK):
            w = self.blocks.model.load(weight)
            grid = fmt.fit(w, how="max")
            rounded[weight.name] = (fmt, encode(w, fmt.levels, *fmt.affine(grid)), grid)
        return rounded

    def errors(self, block: torch.nn.Module, quantized: dict[str, Quantized], moved: dict[str, Grid], batch: Batch) -> Tensor:
        """The slow twin: decoding, block and error in one graph. -> (samples, length)"""
        inside = {}
        for weight in self.blocks.weights(BLOCK):
            fmt, codes, _ = quantized[weight.name]
            w = decode(codes, fmt.levels, *fmt.affine(moved[weight.name]))
            inside[weight.name.removeprefix(f"{self.blocks.prefix(BLOCK)}.") + ".weight"] = w.T if weight.transposed else w
        x, target = (t[batch.where].view(*batch.ids.shape, -1) for t in (self.inputs, self.targets))
        out = functional_call(block, inside, (x,), self.blocks.enter(batch.ids)[1][BLOCK])
        out = out[0] if isinstance(out, tuple) else out
        return (out - target).pow(2).sum(-1) / (target - x).pow(2).sum(-1)


def case(source: Model, count: int = 12) -> Case:
    ids = source.tokenizer(embedded.calibration_text()[:20_000], verbose=False).input_ids
    samples = [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(count)]
    order = torch.cat([batch.ids for batch in minibatches(samples)])
    inputs, outputs = hidden_states(source.module(), order)[BLOCK : BLOCK + 2]
    return Case(Blocks(source), samples, inputs, outputs)


@torch.no_grad()
def hidden_states(module: Callable[..., object], ids: Tensor) -> list[Tensor]:
    """What each block reads, (tokens, width); of the last block's output only a normalised form is given."""
    states = module(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states  # type: ignore[attr-defined]
    return [state.reshape(-1, state.shape[-1]) for state in states]


@pytest.fixture(scope="module", autouse=True)
def small_steps() -> object:
    """Four minibatches and more of these short samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned_scales, "_STEP_TOKENS", 2 * LENGTH)
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
    scales = tuned_scales._Scales(fmt, codes, grid)
    assert set(scales.changes) == {key for key, entry in grid.items() if entry.is_floating_point()} != set()
    scales.decoded(scales.moved()).backward(upstream)
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
    seen = case(small, 4)
    quantized, batch = seen.rounded("q4_0"), seen.batches[0]
    scales = {name: tuned_scales._Scales(*weight) for name, weight in quantized.items()}
    with seen.walk().block(BLOCK) as loaded:
        tuned_scales._Trial(loaded, scales, seen.inputs, seen.targets).add_gradient(batch)
    leaves = {name: grid["d"].float().requires_grad_() for name, (_, _, grid) in quantized.items()}
    with seen.blocks.filled(BLOCK) as block:
        seen.errors(block, quantized, {name: {"d": leaf} for name, leaf in leaves.items()}, batch).mean().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        gradient, expected = scales[name].changes["d"].grad, leaf.grad * leaf.detach()
        # both sum the same few thousand float32 terms, in another order at most
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", FAMILIES)
def test_scales_move_and_nothing_else_does(trained: Case, name: str) -> None:
    quantized = trained.rounded(name)
    codes = {weight: codes.clone() for weight, (_, codes, _) in quantized.items()}
    grids = {weight: {key: entry.clone() for key, entry in grid.items()} for weight, (_, _, grid) in quantized.items()}
    tuned = trained.tune(quantized, steps=12, rate=0.02)  # so few steps on so few tokens want a rate below the usual one
    assert tuned.after < tuned.before
    assert any("were tuned" in note for note in tuned.notes)
    for weight, (_, now, given) in quantized.items():
        assert torch.equal(now, codes[weight])
        for key, entry in tuned.grids[weight].items():
            start = grids[weight][key]
            assert torch.equal(given[key], start)  # what was handed in is not written to
            assert (entry.dtype, entry.shape) == (start.dtype, start.shape)
            assert torch.equal(entry, start) != start.is_floating_point()
            assert not ((entry == 0) & (start != 0)).any()


def test_the_errors_are_those_of_the_held_out_samples(trained: Case) -> None:
    quantized = trained.rounded("q4_0")
    tuned = trained.tune(quantized, steps=12)
    held_out = trained.batches[1::4]
    for error, grids in ((tuned.before, {name: grid for name, (_, _, grid) in quantized.items()}), (tuned.after, tuned.grids)):
        with trained.blocks.filled(BLOCK) as block, torch.no_grad():
            expected = torch.cat([trained.errors(block, quantized, grids, batch) for batch in held_out]).double().mean()
        assert error == pytest.approx(float(expected), rel=1e-4)  # float32, in the same kernels


def test_held_out_samples_are_not_trained_on(trained: Case) -> None:
    quantized = trained.rounded("q4_0")
    tuned = trained.tune(quantized, steps=12)
    other = trained.targets.clone()
    for batch in trained.batches[1::4]:
        other[batch.where] *= 1.001
    again = Case(trained.blocks, trained.samples, trained.inputs, other).tune(quantized, steps=12)
    assert again.after != tuned.after
    for name, grid in tuned.grids.items():
        assert torch.equal(again.grids[name]["d"], grid["d"])


def test_it_is_deterministic(trained: Case) -> None:
    first, second = (trained.tune(trained.rounded("q4_0"), steps=6) for _ in range(2))
    assert (first.before, first.after) == (second.before, second.after)
    assert first.after < first.before  # else nothing moved
    for name, grid in first.grids.items():
        assert all(torch.equal(entry, second.grids[name][key]) for key, entry in grid.items())


def test_steps_are_in_proportion_to_the_rounding_error(trained: Case) -> None:
    quantized = trained.rounded("fp8_e4m3_channel")
    tuned = trained.tune(quantized, steps=1, rate=0.02)
    for weight in trained.blocks.weights(BLOCK):
        (fmt, codes, grid), w = quantized[weight.name], trained.blocks.model.load(weight)
        error = (decode(codes, fmt.levels, *fmt.affine(grid)) - w).norm() / w.norm()
        moved = tuned.grids[weight.name]["scales"] / grid["scales"] - 1
        # Adam's first step is of the size of the rate, whatever the gradient; 1 + change has 24 bits
        torch.testing.assert_close(moved.abs(), (0.02 * error).expand_as(moved), rtol=1e-3, atol=2.0**-22)


def test_what_became_worse_is_given_up(trained: Case) -> None:
    quantized = trained.rounded("q4_0")
    tuned = trained.tune(quantized, steps=3, rate=5.0)
    assert tuned.after == tuned.before
    assert all(tuned.grids[name] is grid for name, (_, _, grid) in quantized.items())
    assert tuned.notes[0].startswith("scales not tuned: the held-out error")


def test_a_format_without_floating_scales_is_passed_through(trained: Case) -> None:
    quantized = trained.rounded("mxfp4")
    tuned = trained.tune(quantized, steps=3)
    assert tuned.before == tuned.after > 0
    assert all(tuned.grids[name] is grid for name, (_, _, grid) in quantized.items())
    assert tuned.notes == ("scales of mxfp4 are not tuned: it has none in floating point",)


def test_one_minibatch_is_too_few(trained: Case) -> None:
    few = Case(trained.blocks, trained.samples[:1], trained.inputs, trained.targets)
    tuned = few.tune(few.rounded("q4_0"), steps=3)
    assert "one minibatch only" in tuned.notes[0]


def test_a_bad_scale_is_repaired(trained: Case) -> None:
    good = trained.rounded("q4_0")
    bad, name = dict(good), f"{trained.blocks.prefix(BLOCK)}.mlp.up_proj"
    fmt, codes, grid = good[name]
    bad[name] = (fmt, codes, {"d": grid["d"] * 1.3})
    repaired, reference = trained.tune(bad, steps=200), trained.tune(good, steps=1)
    assert repaired.before > 5 * reference.before
    # not the scales themselves: the ones of down_proj make up for those of up_proj just as well, and each goes part of the way
    assert repaired.after < 1.05 * reference.before


@pytest.fixture(scope="module")
def tuned(small: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Plan, dict[str, Outcome], dict[str, Outcome], Path]:
    rule = r"1\..*(down_proj|mlp\.c_proj)=fp16"
    plan = planning.uniform(small.weights, targets.get("fewbits"), formats.get("q4_0"), [rule])
    before = {w.name: methods.get("rtn").quantize(small.load(w), formats.get(plan[w.name].format)) for w in small.weights}
    after: dict[str, Outcome] = {}
    path = tmp_path_factory.mktemp("tuned") / "artifact"

    def seen() -> object:
        for weight, outcome in tuned_outcomes(small, plan, case(small, 64).samples, before, steps=40, memory=0):
            after[weight.name] = outcome
            yield weight, outcome

    artifact.write(small, plan, path, seen())  # type: ignore[arg-type]
    return small, plan, before, after, path


Made = tuple[Model, Plan, dict[str, Outcome], dict[str, Outcome], Path]


def test_the_artifact_holds_the_tuned_values(tuned: Made) -> None:
    source, plan, before, after, path = tuned
    made = artifact.Artifact(path)
    assert set(after) == {weight.name for weight in source.weights}
    inner = {weight.name for i in range(3) for weight in Blocks(source).weights(i)}
    for weight in source.weights:
        fmt, outcome = formats.get(plan[weight.name].format), after[weight.name]
        codes, grid = fmt.unpack(outcome.parts)
        old_codes, old_grid = fmt.unpack(before[weight.name].parts)
        assert torch.equal(made.decoded(weight), decode(codes, fmt.levels, *fmt.affine(grid)))
        assert torch.equal(codes, old_codes)
        assert outcome.method == before[weight.name].method
        moved = weight.name in inner and fmt.levels is not None
        assert (outcome.parts is before[weight.name].parts) != moved
        assert not moved or not torch.equal(grid["d"], old_grid["d"])


def test_each_block_is_tuned_on_what_the_quantized_model_gives_it(tuned: Made) -> None:
    """The errors in the notes, from nothing but the two whole models in transformers."""
    source, _, _, after, path = tuned
    batches = minibatches(case(source, 64).samples)
    ids = torch.cat([batch.ids for batch in batches])
    exact, quantized = hidden_states(source.module(), ids), hidden_states(artifact.Artifact(path).module(), ids)
    where = torch.cat([torch.arange(batch.where.start, batch.where.stop) for batch in batches[1::4]])
    notes = [note for outcome in after.values() for note in outcome.notes]
    assert len(notes) == 3
    for index in range(2):
        change = (exact[index + 1] - quantized[index])[where].pow(2).sum(-1)
        expected = ((quantized[index + 1] - exact[index + 1])[where].pow(2).sum(-1) / change).mean()
        errors = re.search(r"held-out error (\S+) -> (\S+)", notes[index])
        assert errors
        assert float(errors[2]) == pytest.approx(float(expected), rel=2e-3)  # a note has four digits
        assert float(errors[2]) < float(errors[1])


def test_samples_of_different_lengths_are_each_seen_once() -> None:
    samples = [list(range(n)) for n in (5, 3, 5, 200, 3, 5)]
    batches = minibatches(samples)
    assert [batch.where.start for batch in batches[1:]] == [batch.where.stop for batch in batches[:-1]]
    assert sorted(row.tolist() for batch in batches for row in batch.ids) == sorted(samples)
    assert all(batch.ids.numel() <= tuned_scales._STEP_TOKENS or len(batch.ids) == 1 for batch in batches)


def test_a_kernel_packs_tuned_grids_as_the_reference_does(trained: Case) -> None:
    for name in ("q4_k", "int4_g32_asym"):
        quantized = trained.rounded(name)
        tuned = trained.tune(quantized, steps=2)
        fmt, codes, _ = next(iter(quantized.values()))
        grid = tuned.grids[next(iter(quantized))]
        parts = kernels.pack(fmt, codes, grid)
        assert all(torch.equal(part, fmt.pack(codes, grid)[key]) for key, part in parts.items())
