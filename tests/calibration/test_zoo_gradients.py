"""What calibration knows of every weight, taken block by block, against a backward pass through the whole module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo.models import MODELS, build

from fewbits import model as models
from fewbits.calibration import collect, collector
from fewbits.calibration.collector import Collector, loss_gradient
from fewbits.calibration.folder import Statistics
from fewbits.calibration.statistics import Moment
from fewbits.calibration.triangles import Triangles
from fewbits.model import Model
from fewbits.model.walk import batches
from fewbits.model.weights import TOWER
from fewbits.store.cache import Cache

WINDOWS = [list(range(3, 19)), list(range(40, 56)), list(range(1007, 1023)), list(range(200, 216))]
FAST = ("gemma2", "falcon_h1", "qwen3_5", "gemma3n", "gemma4_shared", "deepseek_v4")
DECODERS = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n, tiny in MODELS.items() if tiny.kind == "decoder"]
EPS = torch.finfo(torch.float32).eps


class WholeBackward:
    """Hooks on the whole module: for every linear layer the sum of g^2 and of w x x^T, for every embedding that of g g^T."""

    def __init__(self, module: nn.Module, linear: dict[str, str]) -> None:
        self.module = module.eval().requires_grad_(False)
        self.squares: dict[str, Tensor] = {}
        self.fisher: dict[str, Tensor] = {}
        self.lookups: dict[str, Tensor] = {}
        self._tables = {id(parameter): name.removesuffix(".weight") for name, parameter in module.named_parameters()}
        for name, path in linear.items():
            module.get_submodule(path).register_forward_hook(lambda _, inputs, out, name=name: self._watch(name, inputs[0], out))

    def _watch(self, name: str, x: Tensor, out: Tensor) -> None:
        def see(gradient: Tensor) -> None:
            g, seen = gradient.flatten(0, -2).double(), x.detach().flatten(0, -2).double()
            self.squares[name] = self.squares.get(name, 0) + g.square().sum(0)
            self.fisher[name] = self.fisher.get(name, 0) + (seen * g.square().mean(1, keepdim=True)).T @ seen

        if out.requires_grad:
            out.register_hook(see)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        plain = F.embedding

        def embedding(ids: Tensor, table: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            rows, name = plain(ids, table, *args, **kwargs).detach().requires_grad_(), self._tables[id(table)]

            def see(gradient: Tensor) -> None:
                g = gradient.flatten(0, -2).double()
                self.lookups[name] = self.lookups.get(name, 0) + g.T @ g

            rows.register_hook(see)
            return rows

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "embedding", embedding)
            yield

    def run(self, losses: list[Tensor]) -> None:
        samples = [sample for batch in batches(WINDOWS) for sample in batch.split(1)]
        with self._looking():
            for sample, gradient in zip(samples, losses, strict=True):
                logits = self.module(input_ids=sample.ids, use_cache=False, return_dict=False)[0]
                torch.autograd.backward(logits, gradient)


def total(sums: Moment | None) -> Tensor:
    assert sums is not None
    return (sums.total() if isinstance(sums, Triangles) else sums.sum(0)).double()


def assert_equal(found: Tensor, expected: Tensor, longest: int, name: str) -> None:
    """A gradient is a sum of as many products as a matrix is long, and each may be rounded otherwise."""
    assert float((found - expected).abs().max()) <= longest * EPS * float(expected.abs().max()), name


def collected(name: str, folder: Path) -> tuple[Model, Statistics]:
    source = models.open(build(name, folder / "model"))
    return source, collect(source, mixtures.samples_of(WINDOWS), folder / "statistics")


@pytest.mark.parametrize("name", DECODERS)
def test_gradients_are_those_of_the_whole_module(name: str, tmp_path: Path) -> None:
    losses: list[Tensor] = []  # labels that are drawn anew may differ where a probability is rounded otherwise
    drawn = lambda logits, generator: losses.append(loss_gradient(logits, generator)) or losses[-1]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector, "loss_gradient", drawn)
        source, statistics = collected(name, tmp_path)
    seen = [weight for weight in source.weights if weight.expert is None and statistics.site(weight.name)]
    whole = WholeBackward(source.module(), {weight.name: weight.tied_to or weight.name for weight in seen})
    whole.run(losses)
    longest = max(max(weight.shape) for weight in source.weights)
    assert whole.squares.keys() == {weight.name for weight in seen}
    for weight in seen:
        known = statistics.of(weight.name)
        assert_equal(total(known.gradient_square), whole.squares[weight.name], longest, weight.name)
        assert_equal(total(known.fisher), whole.fisher[weight.name], longest, weight.name)
    assert whole.lookups
    for table, expected in whole.lookups.items():
        lookup = statistics.of(table).lookup
        assert lookup is not None
        assert_equal(total(lookup.fisher), expected, longest, table)


UNKNOWN = {  # all that calibration says nothing about, beside towers and experts that no token chose
    "falcon_h1": {"conv1d"},  # in groups: each has another input
    # groups of a product; an indexer, which chooses; a compressor of more tokens than a sample has
    "deepseek_v4": {"o_a_proj", "gate_proj", "kv_proj", "q_b_proj", "weights_proj"},
    "phimoe": {"router"},  # returns what it chose
    "gemma3n": set(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_said(name: str, tmp_path: Path) -> None:
    source, statistics = collected(name, tmp_path)
    weights = [weight for weight in source.weights if weight.kind != TOWER and weight.expert is None]
    unknown = {weight.name for weight in weights if not statistics.of(weight.name).predicts_kl}
    assert {each.rpartition(".")[2] for each in unknown} == UNKNOWN[name]
    assert not any(statistics.of(each).has_importance for each in unknown)


@pytest.mark.parametrize(("name", "attends"), [("lfm2", "self_attn"), ("granitemoehybrid", "self_attn")])
def test_keys_and_values_are_seen_where_a_block_has_nothing_else_to_keep(name: str, attends: str, tmp_path: Path) -> None:
    source, statistics = collected(name, tmp_path)
    for block in range(source.config.num_hidden_layers):
        has_attention = any(f".{block}.{attends}." in weight.name for weight in source.weights)
        assert bool(statistics.kv(block)) == has_attention


def test_a_state_in_files_and_a_run_that_resumes_give_the_same_statistics(tmp_path: Path) -> None:
    """Of a model whose blocks are given inputs of their own and hand on keys and values."""
    source = models.open(build("gemma4_shared", tmp_path / "model"))
    samples = mixtures.samples_of(WINDOWS)
    held = collect(source, samples, tmp_path / "held")
    mapped = collect(source, samples, tmp_path / "mapped", memory=0)
    for step in ("_recorded", "_backward"):
        once = getattr(Collector, step)

        def killed(self: Collector, index: int, *args: Any, once: Any = once) -> Any:
            if index == 2:
                raise KeyboardInterrupt
            return once(self, index, *args)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Collector, step, killed)
            collect(source, samples, tmp_path / "resumed", cache=Cache(tmp_path / "cache"))
    resumed = collect(source, samples, tmp_path / "resumed", cache=Cache(tmp_path / "cache"))
    for other in (mapped, resumed):
        for file in sorted(held.folder.glob("*.safetensors")):
            assert file.read_bytes() == (other.folder / file.name).read_bytes(), file.name
