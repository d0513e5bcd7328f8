"""Predicted KL of single weights: against sums done slowly, and against the model run with that weight changed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fewbits import artifact, calibration, embedded, formats, kernels, methods, model, sensitivity, targets
from fewbits.calibration import split
from fewbits.calibration.folder import Statistics
from fewbits.calibration.text.windows import Window
from fewbits.errors import InputError
from fewbits.model import Model
from fewbits.model.weights import Weight
from fewbits.planning.allocation import allocator
from fewbits.progress import silent
from fewbits.sensitivity import Sensitivity
from fewbits.sensitivity.prediction import Predictor
from fewbits.store.cache import Cache
from fewbits.verification.forecast import accumulation
from fewbits.verification.forecast import probes as probing
from fewbits.verification.forecast.side_by_side import Stream, compare_streams
from fewbits.verification.metrics import MeasuredLogits

MEMORY = 1 << 26
EPS = torch.finfo(torch.float32).eps
GGUF = targets.get("gguf")
FORMATS = ("q2_k", "q3_k", "q4_0", "q4_k", "q6_k", "q8_0")
EMBEDDING, DOWN = "model.embed_tokens", "model.layers.2.mlp.down_proj"


@pytest.fixture(scope="module")
def statistics(embedded_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    drawn = calibration.draw(embedded_model, (), 24, 256, 0)
    return calibration.collect(embedded_model, drawn, tmp_path_factory.mktemp("calibrated") / "stats")


@pytest.fixture(scope="module")
def windows(embedded_model: Model) -> list[Window]:
    """Held-out text: 2,040 predicted tokens."""
    return split.held_out_windows(embedded_model, (), 256, 2040)


@pytest.fixture(scope="module")
def table(embedded_model: Model, statistics: Statistics) -> Sensitivity:
    return sensitivity.measure(embedded_model, statistics, [formats.get(name) for name in FORMATS], "rtn")


@pytest.fixture(scope="module")
def probes(embedded_model: Model, statistics: Statistics, table: Sensitivity, windows: list[Window]) -> list[probing.Probe]:
    return probing.probe(embedded_model, statistics, table, probing.spread_out(table, 9), windows[:4], MEMORY, silent)


@pytest.fixture
def loaded(embedded_model: Model, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of weights in the order in which they are loaded."""
    names: list[str] = []
    before = embedded_model.load

    def load(weight: Weight) -> Tensor:
        names.append(weight.name)
        return before(weight)

    monkeypatch.setattr(embedded_model, "load", load)
    return names


def weight_of(source: Model, name: str) -> Weight:
    return next(weight for weight in source.weights if weight.name == name)


def rounded(source: Model, statistics: Statistics, name: str, fmt: str) -> Tensor:
    """What a file would hold."""
    weight, kind = weight_of(source, name), formats.get(fmt)
    return kernels.decode(kind, methods.get("rtn").quantize(source.load(weight), kind, statistics.of(name)).parts, weight.shape)


def whole_model_kl(reference: Any, changed: Any, windows: list[Window]) -> MeasuredLogits:
    """Both modules at once, a window at a time: no blocks, no buffers, no branches."""
    measured = MeasuredLogits()
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor([window])
            measured.add(reference(ids).logits[0, :-1], changed(ids).logits[0, :-1], ids[0, 1:])
    return measured


def close(kl: float, other: float) -> bool:
    """As far as float32 can tell. Twice KL is the variance of the logits' change, so the root of KL moves by no more than the rounding
    noise of a logit: 4 blocks of some 8 products, each summed over up to 768 terms in another order (sqrt(768) eps), logits up to 20."""
    return abs(math.sqrt(max(kl, 0.0)) - math.sqrt(max(other, 0.0))) <= 20 * EPS * math.sqrt(768 * 4 * 8)


class TestPredicting:
    @pytest.mark.parametrize("fmt", ["q4_0", "q3_k"])
    @pytest.mark.parametrize("name", [DOWN, "model.layers.0.self_attn.v_proj", EMBEDDING])
    def test_all_rows_give_the_expansion_itself(self, name: str, fmt: str, embedded_model: Model, statistics: Statistics) -> None:
        """Half the sum over rows of g2_i e_i H e_i^T, in float64, row by row; a tied embedding is looked up too."""
        w, known = embedded_model.load(weight_of(embedded_model, name)), statistics.of(name)
        assert known.input and known.fisher is not None and known.sensitivity is not None and known.gradient_square is not None
        error = (w - rounded(embedded_model, statistics, name, fmt)).double()
        tokens = 24 * 256
        assert known.input.tokens() == tokens
        h = known.fisher.double().sum(0) / known.sensitivity.sum()
        g2 = known.gradient_square.sum(0) / tokens
        expected = largest = 0.0
        for i, e in enumerate(error):
            expected += 0.5 * float(g2[i]) * float(e @ h @ e)
            largest += 0.5 * float(g2[i]) * float(e.abs() @ h.abs() @ e.abs())
        if name == EMBEDDING:
            assert known.lookup and known.lookup.fisher is not None
            moment, seen = known.lookup.fisher.double().sum(0) / tokens, known.lookup.usage.double()
            once, never = int((seen == 1).sum()), int((seen == 0).sum())
            seen[seen == 0] = once / never  # Good and Turing: all the unseen together as much as those seen once
            for i, e in enumerate(error):
                expected += 0.5 * float(seen[i]) / tokens * float(e @ moment @ e)
                largest += 0.5 * float(seen[i]) / tokens * float(e.abs() @ moment.abs() @ e.abs())
        made = Predictor(w, known, "rtn", weights=1 << 40).cell(formats.get(fmt))
        assert made.kl == pytest.approx(expected, abs=w.shape[1] * EPS * largest) and made.spread == 0 and made.method == "rtn"
        assert made.scores.weight == pytest.approx(float(error.square().sum()), rel=6e-5)  # kept with five digits
        x = known.input.second_moment().double()
        assert made.scores.output == pytest.approx(float(((error @ x) * error).sum()), rel=1e-3)

    def test_some_rows_give_nearly_the_same(self, table: Sensitivity, embedded_model: Model, statistics: Statistics) -> None:
        """The table looks at 65,536 numbers of each weight. 4 of its own standard errors, in 12 cells."""
        for name in (DOWN, EMBEDDING):
            w = embedded_model.load(weight_of(embedded_model, name))
            whole = Predictor(w, statistics.of(name), "rtn", weights=1 << 40)
            for fmt in FORMATS:
                cell, exact = table.rows[name][fmt], whole.cell(formats.get(fmt)).kl
                assert 0 < cell.spread < 0.2 and abs(cell.kl / exact - 1) < 4 * cell.spread

    def test_feedback_is_judged_on_the_half_it_was_not_fitted_to(self, embedded_model: Model, statistics: Statistics) -> None:
        w, known, fmt = embedded_model.load(weight_of(embedded_model, DOWN)), statistics.of(DOWN), formats.get("q4_0")
        auto, forced, plain = (Predictor(w, known, method, 1 << 40).cell(fmt) for method in ("auto", "gptq", "rtn"))
        assert forced.method == "gptq" and plain.method == "rtn" and auto == forced
        error = w - kernels.decode(fmt, methods.get("gptq").quantize(w, fmt, known).parts, (w.shape[0], w.shape[1]))
        both = known.damage(error, w)  # fitted to all samples and judged on them: better than it is
        assert both < forced.kl < plain.kl


class TestWalking:
    @pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj", DOWN, "model.layers.3.mlp.up_proj", EMBEDDING])
    def test_one_changed_weight_is_the_whole_model_with_it(
        self, name: str, embedded_model: Model, statistics: Statistics, windows: list[Window]
    ) -> None:
        changed = rounded(embedded_model, statistics, name, "q3_k")
        few = [*windows[:2], windows[2][:40]]  # of two lengths
        logits = compare_streams(embedded_model, few, {"one": Stream({name: lambda: changed})}, MEMORY, silent).measured["one"]
        theirs = embedded_model.module()
        with torch.no_grad():
            theirs.get_submodule(name).weight.copy_(changed)
        expected = whole_model_kl(embedded_model.module(), theirs, few)
        assert len(logits.kl) == len(expected.kl) == 2 * 255 + 39
        assert np.mean(expected.kl) > 3e-5 and close(float(np.mean(logits.kl)), float(np.mean(expected.kl)))
        # position by position; windows of one length are run together, so their order is another
        assert all(close(a, b) for a, b in zip(sorted(logits.kl), sorted(expected.kl), strict=True))

    def test_streams_do_not_see_each_other(self, embedded_model: Model, statistics: Statistics, windows: list[Window]) -> None:
        names = [EMBEDDING, "model.layers.1.mlp.up_proj", DOWN]
        made = {name: Stream({name: lambda name=name: rounded(embedded_model, statistics, name, "q3_k")}) for name in names}
        every = Stream({name: stream.changed[name] for name, stream in made.items()})
        few = windows[:1]
        at_once = compare_streams(embedded_model, few, made | {"all": every, "none": Stream({})}, MEMORY, silent).measured
        alone = {name: compare_streams(embedded_model, few, {name: stream}, MEMORY, silent).measured[name] for name, stream in made.items()}
        assert all(at_once[name].kl == alone[name].kl for name in names)
        assert max(at_once["none"].kl) == 0 and np.mean(at_once["all"].kl) > max(np.mean(at_once[name].kl) for name in names)
        before = embedded_model.load(weight_of(embedded_model, DOWN))
        assert torch.equal(before, model.open(embedded.MODEL).load(weight_of(embedded_model, DOWN)))


def correlation_of(source: Model, statistics: Statistics, table: Sensitivity, weights: int, windows: list[Window]) -> float:
    wanted = probing.spread_out(table, weights)
    assert len(wanted) == 3 * weights
    return probing.log_correlation(probing.probe(source, statistics, table, wanted, windows, MEMORY, silent))


class TestProbing:
    def test_predictions_rank_as_measurements_do(self, probes: list[probing.Probe]) -> None:
        assert len(probes) == 27 and {probe.kind for probe in probes} == {"embedding", "attention", "mlp"}
        logs = np.log([[probe.predicted, probe.measured] for probe in probes])
        assert np.corrcoef(logs.T)[0, 1] == pytest.approx(probing.log_correlation(probes)) and probing.log_correlation(probes) >= 0.97

    def test_factors_are_the_mean_of_what_was_missed(self, probes: list[probing.Probe]) -> None:
        by_kind = probing.factors(probes)
        for kind, factor in by_kind.items():
            missed = [math.log(p.measured / p.predicted) for p in probes if p.kind == kind]
            assert factor.weights == len(missed) and math.log(factor.factor) == pytest.approx(np.mean(missed))
            assert factor.spread == pytest.approx(np.std(missed))
            # on 1,020 tokens the 95 % interval of one weight's mean KL reaches from 10 to 40 % to either side (block bootstrap)
            assert 1 / 1.5 < factor.factor < 1.5
        made_up = [probing.Probe("w", "mlp", "q4_0", 1.0, 2.0), probing.Probe("v", "mlp", "q4_0", 1.0, 0.0)]
        assert probing.factors(made_up)["mlp"].factor == pytest.approx(2.0)  # what measured nothing has no logarithm

    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_a_few_probes_correlate_with_nothing(self, number: int, table: Sensitivity, probes: list[probing.Probe]) -> None:
        assert math.isnan(probing.log_correlation(probes[:number]))
        assert all(math.isnan(score.rank_correlation) for score in probing.compare_scores(table, probes[:number]))

    def test_less_knowledge_wastes_bits(self, table: Sensitivity, probes: list[probing.Probe]) -> None:
        scores = {score.name: score for score in probing.compare_scores(table, probes)}
        assert set(scores) == {"weight", "output", "gradient", "diagonal", "kl"}
        assert scores["kl"].bits_wasted == pytest.approx(0, abs=1e-5)  # the solver's gap of 1e-6, of some 8 bits
        assert scores["weight"].bits_wasted > 0.05 and scores["output"].bits_wasted > 0.05
        assert scores["kl"].rank_correlation > max(scores["weight"].rank_correlation, scores["output"].rank_correlation)

    def test_without_gradients_the_plan_is_worse_in_fact(
        self, embedded_model: Model, statistics: Statistics, table: Sensitivity, windows: list[Window]
    ) -> None:
        """Two plans of the same bytes, both run: one by predicted KL, one by the error of each weight's output."""
        rows = {n: {f: replace(cell, kl=cell.scores.output) for f, cell in row.items()} for n, row in table.rows.items()}
        size, streams = 2_000_000, {}
        for name, known in (("kl", table), ("output", replace(table, rows=rows))):
            plan = allocator(known, GGUF).within_bytes(size, "")
            assert 0.99 * size < plan.nbytes <= size
            streams[name] = Stream(
                {e.weight: lambda e=e: rounded(embedded_model, statistics, e.weight, e.format) for e in plan.entries if e.format != "fp16"}
            )
        logits = compare_streams(embedded_model, windows[:4], streams, MEMORY, silent).measured
        assert np.mean(logits["kl"].kl) < 0.9 * np.mean(logits["output"].kl)

    @pytest.mark.slow
    def test_predictions_rank_as_measurements_do_over_most_weights(self, embedded_model: Model, tmp_path: Path) -> None:
        """The issue's bar: 24 weights in 3 formats, all that GGUF carries measured."""
        known = calibration.collect(embedded_model, calibration.draw(embedded_model, (), 64, 512, 0), tmp_path / "stats")
        table = sensitivity.measure(embedded_model, known, [formats.get(name) for name in GGUF.candidates], "rtn")
        windows = split.held_out_windows(embedded_model, (), 512, 8192)
        assert correlation_of(embedded_model, known, table, 24, windows) >= 0.97


class TestMeasuring:
    WANTED = ("q4_0", "q8_0")

    def measured(self, source: Model, statistics: Statistics, cache: Path | None = None, names: tuple[str, ...] = WANTED) -> Sensitivity:
        return sensitivity.measure(source, statistics, [formats.get(name) for name in names], "rtn", cache=Cache(cache) if cache else None)

    def test_every_weight_in_every_format_and_as_it_is(self, table: Sensitivity, embedded_model: Model) -> None:
        assert list(table.rows) == [weight.name for weight in embedded_model.weights]
        for row in table.rows.values():
            assert list(row) == [*FORMATS, "fp16"]
            assert row["fp16"].kl == 0 and row["fp16"].method == "cast"  # the checkpoint is in float16
            assert row["q2_k"].kl > row["q3_k"].kl > row["q4_k"].kl > row["q6_k"].kl > row["q8_0"].kl > 0

    def test_a_run_that_was_cut_short_goes_on(
        self, embedded_model: Model, statistics: Statistics, loaded: list[str], tmp_path: Path
    ) -> None:
        whole = self.measured(embedded_model, statistics, tmp_path)
        rows = {path: path.read_bytes() for path in tmp_path.glob("row-*")}
        names = [weight.name for weight in embedded_model.weights]
        assert len(rows) == 29 and loaded == names
        gone = sorted(rows)[::3]  # in the order of their hashes, which is none
        for path in gone[1:]:
            path.unlink()
        gone[0].write_bytes(rows[gone[0]][:-1])  # cut short
        loaded.clear()
        assert self.measured(embedded_model, statistics, tmp_path) == whole
        assert len(loaded) == len(gone) == 10 and loaded == [name for name in names if name in loaded]
        assert {path: path.read_bytes() for path in tmp_path.glob("row-*")} == rows
        loaded.clear()
        assert self.measured(embedded_model, statistics, tmp_path) == whole and not loaded

    def test_rows_of_other_settings_are_not_mixed_in(
        self, embedded_model: Model, statistics: Statistics, loaded: list[str], tmp_path: Path
    ) -> None:
        few = calibration.collect(embedded_model, calibration.draw(embedded_model, (), 2, 64, 1), tmp_path / "few")
        for known, names in ((statistics, self.WANTED), (few, self.WANTED), (few, ("q8_0",))):
            loaded.clear()
            table = self.measured(embedded_model, known, tmp_path / "cache", names)
            assert table == self.measured(embedded_model, known, None, names) and len(loaded) == 2 * 29
        assert len(list((tmp_path / "cache").iterdir())) == 3 * 29

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def test_a_method_is_spelt_in_any_case(self, table: Sensitivity, embedded_model: Model, statistics: Statistics) -> None:
        measured = sensitivity.measure(embedded_model, statistics, [formats.get("q3_k")], "RTN")
        assert measured.method == "rtn" and all(row["q3_k"] == table.rows[name]["q3_k"] for name, row in measured.rows.items())

    @pytest.mark.parametrize("wrong", [("--kv", "int99"), ("--probes", 2, "--held-out", "missing.txt")])
    def test_what_is_wrong_is_said_before_anything_is_measured(
        self, wrong: tuple[object, ...], run: Any, statistics: Statistics, tmp_path: Path
    ) -> None:
        words = ("measure", embedded.MODEL, "--stats", statistics.folder, "-o", tmp_path / "t.json", "--formats", "q8_0", "--method", "rtn")
        code, _, err = run(*words, *wrong)
        assert code == 2 and "hint:" in err and not list(tmp_path.iterdir())

    def test_threads_change_nothing(self, embedded_model: Model, statistics: Statistics, tmp_path: Path) -> None:
        results = []
        for count in (1, 2):
            with self.threads(count):
                results.append(self.measured(embedded_model, statistics, tmp_path / str(count)))
                assert torch.get_num_threads() == count
        rows = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("1", "2")]
        assert results[0] == results[1] and rows[0] == rows[1] and len(rows[0]) == 29

    def test_what_cannot_be_measured_is_refused(self, embedded_model: Model, statistics: Statistics, tmp_path: Path) -> None:
        blind = calibration.collect(embedded_model, calibration.draw(embedded_model, (), 2, 32, 0), tmp_path / "blind", gradients=False)
        with pytest.raises(InputError, match="hold no gradients"):
            self.measured(embedded_model, blind)
        other = Statistics(statistics.folder)
        other.about["model_sha256"] = "0" * 64
        with pytest.raises(InputError, match="statistics of another model"):
            self.measured(embedded_model, other)

    def test_inputs_are_measured_too(self, embedded_model: Model, statistics: Statistics, table: Sensitivity) -> None:
        """By hand, of the inputs that calibration kept: rounded to 255 levels under one scale for each token."""
        known, w = statistics.of(DOWN), embedded_model.load(weight_of(embedded_model, DOWN)).double()
        assert known.input and known.sensitivity is not None and known.gradient_square is not None
        g2 = known.gradient_square.sum(0) / (24 * 256)
        total = 0.0
        for place, x in enumerate((known.input.firsts()[:32].double(), known.input.drawn()[:512].double())):
            scale = x.abs().amax(1, keepdim=True) / 127
            square = ((x - (x / scale).round() * scale) @ w.T).square()
            total += 0.5 * float(known.sensitivity[:, place].sum()) / (24 * 256) * float((square @ (g2 / g2.mean())).mean())
        assert table.activations[DOWN]["int8"] == pytest.approx(total, rel=0.01)  # codes next to the middle of two may fall either way
        assert set(table.activations) == {weight.name for weight in embedded_model.weights}


class TestAccumulating:
    def test_the_last_row_is_the_model_as_it_is_in_the_artifact(
        self, embedded_model: Model, statistics: Statistics, table: Sensitivity, windows: list[Window], tmp_path: Path
    ) -> None:
        plan = allocator(table, GGUF).within_bytes(1_700_000, "")
        made = artifact.quantize(embedded_model, plan, tmp_path / "a", silent, statistics)
        budget = accumulation.accumulate(embedded_model, made, windows[:3], MEMORY, silent)
        assert [row.block for row in budget.rows] == [-1, 0, 1, 2, 3] and [row.weights for row in budget.rows] == [1, 7, 7, 7, 7]
        assert budget.tokens == 3 * 255
        whole = whole_model_kl(embedded_model.module(), made.module(), windows[:3])
        assert close(budget.rows[-1].measured_so_far, float(np.mean(whole.kl)))
        prefix = embedded_model.module()  # the embedding, and the first two blocks
        quantized = made.module()
        with torch.no_grad():
            prefix.model.embed_tokens.weight.copy_(quantized.model.embed_tokens.weight)
            for block in (0, 1):
                prefix.model.layers[block].load_state_dict(quantized.model.layers[block].state_dict())
        two = whole_model_kl(embedded_model.module(), prefix, windows[:3])
        assert close(budget.rows[2].measured_so_far, float(np.mean(two.kl)))
        so_far = 0.0
        for row in budget.rows:
            here = f"model.layers.{row.block}." if row.block >= 0 else "model.embed"
            assert row.predicted == pytest.approx(math.fsum(e.kl or 0.0 for e in made.plan.entries if e.weight.startswith(here)))
            so_far += row.predicted or 0.0
            assert row.predicted_so_far == pytest.approx(so_far)
        assert so_far == pytest.approx(plan.kl, rel=1e-3)  # plan.json has four digits
        errors = [row.hidden_error for row in budget.rows]
        assert errors[0] == 0 and all(error > 0 for error in errors[1:])

    def test_a_plan_without_forecasts_has_none_here(
        self, embedded_model: Model, windows: list[Window], tmp_path: Path, run: Callable[..., tuple[int, str, str]]
    ) -> None:
        from fewbits import planning

        uniform = planning.uniform(embedded_model.weights, GGUF, formats.get("q4_0"))
        made = artifact.quantize(embedded_model, uniform, tmp_path / "a", silent)
        errors = accumulation.accumulate(embedded_model, made, windows[:1], MEMORY, silent)
        assert all(row.predicted is None and row.predicted_so_far is None and row.measured_so_far > 0 for row in errors.rows)
        code, out, err = run("compare", embedded.MODEL, "--blocks", tmp_path / "a", "--tokens", 512, "--json")
        assert code == 0, err
        told = json.loads(out)
        assert told["tokens"] == 511 and [row["block"] for row in told["rows"]] == [-1, 0, 1, 2, 3]
