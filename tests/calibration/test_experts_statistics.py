"""Statistics of experts that lie stacked in one parameter: those of the tokens that chose them, and of none where none did."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mixtures import CHOSEN, MIXTURES, NEVER, experts_of, samples_of, save_all, theirs_of
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from fewbits import calibration, embedded, formats, model, planning, sensitivity, targets
from fewbits.artifact import outcomes
from fewbits.calibration import folder, text
from fewbits.calibration.collector import loss_gradient
from fewbits.calibration.folder import Statistics
from fewbits.model import Model
from fewbits.planning.allocation import allocator
from fewbits.progress import silent


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_all(tmp_path_factory)


@pytest.fixture(scope="module", params=list(MIXTURES))
def mixture(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Model:
    return model.open(folders[request.param])


@pytest.fixture(scope="module")
def windows(embedded_model: Model) -> list[list[int]]:
    return text.windows.windows(embedded.calibration_text(), embedded_model.tokenizer, 24)[:6]


class Seen:
    """One expert's matrix, token by token: what it read, the gradient of what it gave, and where in its sample the token was."""

    def __init__(self) -> None:
        self.x: list[Tensor] = []
        self.g: list[Tensor] = []
        self.place: list[int] = []

    def add(self, x: Tensor, g: Tensor, place: int) -> None:
        self.x.append(x.detach().double())
        self.g.append(g.detach().double())
        self.place.append(place)


def direct(source: Model, ids: list[list[int]]) -> Iterator[dict[str, Seen]]:
    """Per sample, from the whole module: the experts' inputs and output gradient by hooks, the rest token by token as the formula says."""
    module = theirs_of(source)
    transposed = source.config.model_type == "gpt_oss"
    layers = {f"model.layers.{i}.mlp.experts": layer.mlp.experts for i, layer in enumerate(module.model.layers)}
    calls: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Callable[..., None]:
        def see(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            calls[name] = [x.detach() for x in inputs]
            out.register_hook(calls[name].append)

        return see

    for name, experts in layers.items():
        experts.register_forward_hook(watch(name))
    generator = torch.Generator().manual_seed(0)
    for row in ids:
        out = module(input_ids=torch.tensor([row]), use_cache=False).logits
        out.backward(loss_gradient(out.detach(), generator))
        seen = {weight.name: Seen() for weight in experts_of(source)}
        for name, experts in layers.items():
            hidden, chosen, weights, back = calls[name]
            for token, slot in torch.cartesian_prod(torch.arange(len(row)), torch.arange(2)).tolist():
                e = int(chosen[token, slot])
                up, down = (p[e].T if transposed else p[e] for p in (experts.gate_up_proj.detach(), experts.down_proj.detach()))
                z = F.linear(hidden[token], up, experts.gate_up_proj_bias[e].detach() if transposed else None).requires_grad_()
                middle = experts._apply_gate(z)
                g = weights[token, slot] * back[token]
                middle.backward(down.T @ g)
                assert z.grad is not None
                seen[f"{name}.gate_up_proj.{e}"].add(hidden[token], z.grad, token)
                seen[f"{name}.down_proj.{e}"].add(middle, g, token)
        yield seen


def joined(parts: list[dict[str, Seen]], name: str) -> tuple[Tensor, Tensor, Tensor]:
    x, g = ([row for part in parts for row in getattr(part[name], field)] for field in "xg")
    first = torch.tensor([place == 0 for part in parts for place in part[name].place], dtype=torch.bool)
    return torch.stack(x), torch.stack(g), first


@pytest.fixture(scope="module")
def measured(mixture: Model, windows: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    return calibration.collect(mixture, samples_of(windows), tmp_path_factory.mktemp("stats") / "stats")


class TestStatistics:
    def test_an_experts_are_those_of_its_tokens(self, mixture: Model, measured: Statistics, windows: list[list[int]]) -> None:
        halves = [windows[0::2], windows[1::2]]  # as batches are made: one half, then the other
        seen = list(direct(mixture, [row for half in halves for row in half]))
        for name in (weight.name for weight in experts_of(mixture)):
            if name in (NEVER.format("gate_up_proj"), NEVER.format("down_proj")) and mixture.config.model_type == "gpt_oss":
                continue
            ours = measured.of(name, alone=True)
            assert ours.input and ours.input.moment is not None
            assert ours.sensitivity is not None and ours.gradient_square is not None and ours.fisher is not None
            for half in (0, 1):
                x, g, first = joined(seen[3 * half : 3 * half + 3], name)
                later = x[~first]
                assert int(ours.input.count[half]) == len(later) and len(ours.input.firsts(half)) == int(first.sum())
                # activations differ in float32's last bits between a batch of three samples and one: as in test_statistics.py
                close = {"rtol": 2e-4, "atol": 2e-4 * float(x.square().mean())}
                torch.testing.assert_close(ours.input.square[half], later.square().sum(0), **close)
                moment, firsts = ours.input.moment[half].double(), ours.input.firsts(half).double()
                torch.testing.assert_close(moment, later.T @ later, rtol=1e-3, atol=1e-4 * float(later.square().sum(0).max()))
                torch.testing.assert_close(firsts.T @ firsts, x[first].T @ x[first], rtol=1e-3, atol=1e-4 * float(x.square().max()))
                w = g.square().mean(-1)
                torch.testing.assert_close(ours.sensitivity[half], torch.stack([w[first].sum(), w[~first].sum()]), rtol=2e-3, atol=1e-12)
                torch.testing.assert_close(ours.gradient_square[half], g.square().sum(0), rtol=5e-3, atol=1e-9)
                fisher = (x * w.unsqueeze(1)).T @ x
                torch.testing.assert_close(ours.fisher[half].double(), fisher, rtol=5e-3, atol=1e-4 * float(fisher.diagonal().max()))

    def test_an_expert_costs_only_the_tokens_that_it_is_given(self, mixture: Model, measured: Statistics, windows: list[list[int]]) -> None:
        """The predicted KL is a mean over the whole text: the shares of all experts of a layer add up to the two that a token chooses."""
        tokens = sum(map(len, windows))
        for stack, counts in measured.about["experts"].items():
            shares = [measured.of(f"{stack}.down_proj.{expert}").share for expert, count in enumerate(counts) if count]
            assert shares == [count / tokens for count in counts if count] and sum(shares) == pytest.approx(2)
        known = measured.of(CHOSEN.format("down_proj"), alone=True)
        error = torch.randn(known.gradient_square.shape[1], known.input.cols, generator=torch.Generator().manual_seed(0))
        x, g, _ = joined(
            list(direct(mixture, [row for half in (windows[0::2], windows[1::2]) for row in half])), CHOSEN.format("down_proj")
        )
        w = g.square().mean(-1)
        moved = ((x @ error.double().T).square() * w.unsqueeze(1)).sum(0) / w.sum()  # by output, tokens weighted by their loss
        expected = 0.5 * float((g.square().sum(0) * moved).sum()) / tokens
        assert float(known.row_damage(error).sum()) == pytest.approx(expected, rel=1e-2)

    def test_kept_inputs_are_real_ones(self, mixture: Model, measured: Statistics, windows: list[list[int]]) -> None:
        seen = list(direct(mixture, windows))
        for half in (0, 1):
            x, _, first = joined(seen[half::2], CHOSEN.format("down_proj"))
            drawn = measured.input(CHOSEN.format("down_proj")).drawn(half).double()
            assert 0 < len(drawn) <= 8 * 3
            assert (torch.cdist(drawn, x[~first]).min(1).values < 2e-3 * x.norm(dim=1).max()).all()  # float16 keeps 11 bits

    def test_what_was_counted_is_what_was_recorded(self, mixture: Model, measured: Statistics) -> None:
        for stack, counts in measured.about["experts"].items():
            for expert, count in enumerate(counts):
                assert (
                    measured.input(f"{stack}.gate_up_proj.{expert}").tokens()
                    == count
                    == measured.input(f"{stack}.down_proj.{expert}").tokens()
                )


class TestNeverChosen:
    @pytest.fixture
    @staticmethod
    def source(folders: dict[str, Path]) -> Model:
        return model.open(folders["gpt_oss"])

    def test_an_expert_without_tokens_borrows_and_that_is_said(self, source: Model, windows: list[list[int]], tmp_path: Path) -> None:
        statistics = calibration.collect(source, samples_of(windows[:2]), tmp_path / "stats")
        assert statistics.of(NEVER.format("down_proj"), alone=True).input is None
        assert statistics.of(NEVER.format("down_proj")).borrowed == 1 and statistics.of(CHOSEN.format("down_proj")).borrowed < 1
        for method in ("gptq", "auto"):
            plan = planning.uniform(source.weights, targets.get("fewbits"), formats.get("int4_g32"), method=method)
            made = {weight.name: outcome for weight, outcome in outcomes.independent(source, plan, statistics, silent)}
            unseen = made[NEVER.format("gate_up_proj")]
            assert unseen.method == "gptq" and "those of all experts" in unseen.notes[0]

    def test_tokens_in_one_half_alone_are_enough(self, source: Model, windows: list[list[int]], tmp_path: Path) -> None:
        statistics = calibration.collect(source, samples_of(windows[:1]), tmp_path / "stats")
        seen = statistics.of(CHOSEN.format("down_proj"), alone=True).input
        assert seen is not None and seen.tokens(0) and not seen.tokens(1)
        plan = planning.uniform(source.weights, targets.get("fewbits"), formats.get("int4_g32"), method="gptq")
        made = {weight.name: outcome for weight, outcome in outcomes.independent(source, plan, statistics, silent)}
        assert made[CHOSEN.format("down_proj")].method == "gptq"

    def test_runs_that_chose_other_experts_merge(self, source: Model, windows: list[list[int]], tmp_path: Path) -> None:
        parts = [calibration.collect(source, samples_of([row]), tmp_path / str(i)) for i, row in enumerate([windows[0][:3], windows[1]])]
        reached = [{name for name in part.names if part.of(name, alone=True).input} for part in parts]
        assert reached[0] != reached[1]
        merged = folder.merge([part.folder for part in parts], tmp_path / "merged")
        name = CHOSEN.format("down_proj")
        assert merged.input(name).tokens() == sum(part.input(name).tokens() for part in parts)
        assert merged.of(NEVER.format("down_proj"), alone=True).input is None and merged.of(NEVER.format("down_proj")).borrowed == 1


def test_an_expert_that_no_token_chose_does_no_harm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, vocab_size=2048, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    theirs = MixtralForCausalLM(config)
    with torch.no_grad():
        theirs.model.layers[0].post_attention_layernorm.weight.zero_()
    theirs.save_pretrained(tmp_path / "mixtral")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, tmp_path / "mixtral" / name)
    source = model.open(tmp_path / "mixtral")
    statistics = calibration.collect(source, calibration.draw(source, (), 4, 32, 0), tmp_path / "stats")
    reached = {weight.name: statistics.of(weight.name, alone=True).input is not None for weight in source.weights}
    never = [weight for weight in source.weights if weight.expert is not None and not reached[weight.name]]
    assert len(never) == 4  # all inputs of the first router are zero, all its logits equal: the same two experts for every token
    wanted = [formats.get(name) for name in ("int4_g32", "int8_g32")]
    table = sensitivity.measure(source, statistics, wanted, "rtn")
    for weight in never:
        assert {fmt: cell.kl for fmt, cell in table.rows[weight.name].items()} == {"int4_g32": 0, "int8_g32": 0, "fp32": 0}
    chosen = [weight for weight in source.weights if weight.expert is not None and "layers.1" in weight.name and reached[weight.name]]
    assert chosen and all(table.rows[weight.name]["int4_g32"].kl > table.rows[weight.name]["int8_g32"].kl > 0 for weight in chosen)
    whole = allocator(table, targets.get("fewbits"))
    plan = whole.within_bytes(2 * whole.least_bytes, "")
    for stack in {weight.together for weight in never}:  # in a file they are one tensor
        assert len({plan[weight.name].format for weight in source.weights if weight.together == stack}) == 1
