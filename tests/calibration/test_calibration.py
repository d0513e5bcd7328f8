"""Calibration through the public commands, and the methods that read it."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from enumerated import one_of
from transformers import GPT2Config, GPT2LMHeadModel

import fewbits
from fewbits import artifact, calibration, embedded, formats, kernels, methods, model, planning, targets
from fewbits.calibration.folder import Statistics
from fewbits.calibration.importance_matrix import ImportanceMatrix
from fewbits.calibration.split import split as split_text
from fewbits.calibration.statistics import WeightStatistics
from fewbits.errors import InputError
from fewbits.methods import error_feedback, gptq, rtn
from fewbits.methods.gptq import Gptq
from fewbits.progress import silent
from fewbits.reporting.results.quantized import Quantized

DOWN = "model.layers.2.mlp.down_proj"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> calibration.Calibrated:
    folder = tmp_path_factory.mktemp("calibrated")
    return fewbits.calibrate(embedded.MODEL, folder / "stats", imatrix=folder / "imatrix.gguf", samples=12, length=128)


@pytest.fixture(scope="module")
def known(calibrated: calibration.Calibrated) -> Callable[[str], WeightStatistics]:
    return calibrated.statistics.of


def damage(w: torch.Tensor, fmt: formats.Format, outcome: methods.Outcome, statistics: WeightStatistics) -> float:
    return statistics.damage(w - kernels.decode(fmt, outcome.parts, (w.shape[0], w.shape[1])), w, 1)


def test_calibrate_tells_how_representative_its_text_is(calibrated: calibration.Calibrated) -> None:
    told = calibrated.to_dict()
    json.dumps(told)
    assert told["runs"][0]["samples"] == 12 and told["runs"][0]["tokens"] == 12 * 128  # type: ignore[index]
    assert 0.1 < calibrated.coverage.vocabulary_seen < 1
    assert any("few" in warning for warning in calibrated.coverage.warnings)
    assert len(calibrated.drift) == 29 and calibrated.drift[0].importance >= calibrated.drift[-1].importance > 0
    assert calibrated.drift[0].hessian is not None


def test_more_data_drifts_less(calibrated: calibration.Calibrated, tmp_path: Path) -> None:
    more = fewbits.calibrate(embedded.MODEL, tmp_path / "stats", samples=48, length=128, no_gradients=True, no_hessians=True)
    by_name = {row.weight: row.importance for row in calibrated.drift}
    ratios = [by_name[row.weight] / row.importance for row in more.drift]
    assert np.median(ratios) > 1.4  # by theory 2: sampling errors fall with the square root of four times the data


class TestMethods:
    def test_auto_takes_what_does_least_damage_on_the_other_half(
        self, embedded_model: model.Model, known: Callable[[str], WeightStatistics]
    ) -> None:
        for weight in [w for w in embedded_model.weights if w.name in (DOWN, "model.layers.0.self_attn.v_proj", "model.embed_tokens")]:
            outcome = methods.get("auto").quantize(embedded_model.load(weight), formats.get("q4_0"), known(weight.name))
            assert set(outcome.damage) == {"rtn", "rtn, by importance", "gptq"}
            assert outcome.method == min(outcome.damage, key=lambda name: outcome.damage[name]).split(",")[0]

    @pytest.mark.parametrize("name", ["q4_0", "q4_k", "iq4_nl", "q3_k", "int4_g128", "int4_g32_asym", "mxfp4", "fp8_e4m3_channel"])
    def test_gptq_halves_the_damage_of_rounding(
        self, name: str, embedded_model: model.Model, known: Callable[[str], WeightStatistics]
    ) -> None:
        """Fitted to all samples and judged on half of them; quality.md's ratios on held-out text are .4 to .75."""
        weight = next(w for w in embedded_model.weights if w.name == DOWN)
        w, fmt, statistics = embedded_model.load(weight), formats.get(name), known(DOWN)
        rounding, ours = (methods.get(method).quantize(w, fmt, statistics) for method in ("rtn", "gptq"))
        assert damage(w, fmt, ours, statistics) < 0.5 * damage(w, fmt, rounding, statistics)
        assert not ours.notes

    def test_a_hessian_that_cannot_be_used_is_said_and_searched_instead(self, known: Callable[[str], WeightStatistics]) -> None:
        statistics = known(DOWN)
        assert statistics.input and statistics.input.moment is not None
        broken = replace(statistics, input=replace(statistics.input, moment=statistics.input.moment * torch.nan), fisher=None, outputs=None)
        w = torch.randn(32, 768, generator=torch.Generator().manual_seed(0))
        outcome = methods.get("gptq").quantize(w, formats.get("q4_0"), broken)
        assert outcome.method == "rtn" and "no error feedback" in outcome.notes[0]
        rounded = methods.get("rtn").quantize(w, formats.get("q4_0"), broken)
        assert torch.equal(outcome.parts["blocks"], rounded.parts["blocks"])

    def test_gptq_without_hessians_is_refused(self, known: Callable[[str], WeightStatistics]) -> None:
        statistics = known(DOWN)
        assert statistics.input
        bare = WeightStatistics(replace(statistics.input, moment=None))
        for given in (None, bare):
            with pytest.raises(InputError, match="second moments"):
                methods.get("gptq").quantize(torch.randn(8, 768), formats.get("q4_0"), given)
        assert methods.get("auto").quantize(torch.randn(8, 768), formats.get("q4_0"), bare).method == "rtn"

    def test_a_cast_is_kept_by_every_method(self, known: Callable[[str], WeightStatistics]) -> None:
        w = torch.randn(8, 768)
        for name in methods.all():
            assert torch.equal(methods.get(name).quantize(w, formats.get("fp16"), known(DOWN)).parts["values"], w.half())

    def test_the_hessian_knows_the_sink(self, embedded_model: model.Model, known: Callable[[str], WeightStatistics]) -> None:
        """Where most of the sensitivity sits on position 0, the plain Hessian serves the wrong inputs: error there is higher."""
        name = "model.layers.0.self_attn.v_proj"
        statistics = known(name)
        assert statistics.input and statistics.sensitivity is not None
        first, later = statistics.sensitivity.sum(0).tolist()
        assert first / (first + later) > 10 / 128  # one position of 128
        weight = next(w for w in embedded_model.weights if w.name == name)
        w, fmt, inputs = embedded_model.load(weight), formats.get("q4_0"), statistics.input.first
        errors = {}
        for kind in ("aware", "plain"):
            decoded = kernels.decode(fmt, Gptq(kind).quantize(w, fmt, statistics).parts, weight.shape)
            errors[kind] = float(((w - decoded) @ inputs.T).square().sum())
        assert errors["aware"] < 0.7 * errors["plain"]

    def test_damping_is_chosen_by_what_was_not_fitted(self, known: Callable[[str], WeightStatistics]) -> None:
        """Judged on the very inputs it was fitted to, the least damping wins (or the next, by the luck of rounding); on inputs with no
        structure in common, the most."""
        statistics = known(DOWN)
        assert statistics.fisher is not None
        w = torch.randn(256, 768, generator=torch.Generator().manual_seed(0))
        fitted, other = statistics.hessian(0), torch.eye(768)
        same = replace(statistics, fisher=torch.stack([statistics.fisher[0], fitted]))
        unlike = replace(statistics, fisher=torch.stack([statistics.fisher[0], other]))
        assert gptq.choose_damping(w, formats.get("q4_0"), same).inputs in sorted(gptq.DAMPINGS)[:2]
        assert gptq.choose_damping(w, formats.get("q4_0"), unlike).inputs == max(gptq.DAMPINGS)


class TestQuantize:
    @pytest.fixture(scope="class")
    @staticmethod
    def result(tmp_path_factory: pytest.TempPathFactory, calibrated: calibration.Calibrated) -> Quantized:
        out = tmp_path_factory.mktemp("quantized") / "auto.gguf"
        return fewbits.quantize(embedded.MODEL, out, format="q4_0", stats=calibrated.folder, tokens=4000)

    def test_it_is_nearer_than_rounding_in_llama_cpp(self, result: Quantized, tmp_path: Path) -> None:
        plain = fewbits.quantize(embedded.MODEL, tmp_path / "rtn.gguf", format="q4_0", method="rtn", tokens=4000)
        assert result.verdict and plain.verdict and result.verdict.bits_per_weight == plain.verdict.bits_per_weight
        assert result.verdict.kl_mean < 0.75 * plain.verdict.kl_mean

    def test_the_report_says_which_method_and_by_how_much(self, result: Quantized) -> None:
        written = json.loads((result.artifact.parent / "results.json").read_text())
        assert len(written["outcomes"]) == 29
        assert {row["method"] for row in written["outcomes"].values()} <= {"gptq", "rtn"}
        assert all(min(row["damage"].values()) <= row["damage"]["rtn"] for row in written["outcomes"].values())

    def test_text_is_split_and_statistics_are_found_again(self, tmp_path: Path) -> None:
        text = tmp_path / "text.txt"
        text.write_text(embedded.calibration_text()[:60_000])
        options = {"format": "q8_0", "method": "auto", "data": text, "samples": 6, "length": 64, "tokens": 512}
        first = fewbits.quantize(embedded.MODEL, tmp_path / "a.gguf", **options)
        assert first.coverage is not None and first.coverage.samples == 6
        assert first.coverage.overlap is not None and first.coverage.overlap.share < 0.05  # held out, not the same windows
        stamp = (tmp_path / "a.gguf.work" / "statistics" / "statistics.json").stat().st_mtime_ns
        content = (tmp_path / "a.gguf").read_bytes()
        fewbits.quantize(embedded.MODEL, tmp_path / "a.gguf", **options)
        assert (tmp_path / "a.gguf.work" / "statistics" / "statistics.json").stat().st_mtime_ns == stamp
        assert (tmp_path / "a.gguf").read_bytes() == content  # and the same bytes again

    def test_sequential_statistics_are_those_of_the_quantized_model(self, tmp_path: Path, embedded_model: model.Model) -> None:
        options = {"format": "q4_0", "method": "gptq", "samples": 4, "length": 64, "no_verify": True}
        made = fewbits.quantize(embedded.MODEL, tmp_path / "s.gguf", sequential=True, **options)
        side_by_side = fewbits.quantize(embedded.MODEL, tmp_path / "p.gguf", **options)
        one, other = artifact.Artifact(made.artifact), artifact.Artifact(side_by_side.artifact)
        same = [torch.equal(one.decoded(w), other.decoded(w)) for w in embedded_model.weights if ".mlp.down" in w.name]
        assert not any(same[1:])  # the first block reads the same inputs; later ones do not

    def test_statistics_of_another_model_are_refused(
        self, narrow_checkpoint: Path, calibrated: calibration.Calibrated, tmp_path: Path
    ) -> None:
        with pytest.raises(InputError, match="another model"):
            fewbits.quantize(narrow_checkpoint, tmp_path / "x.gguf", format="q4_0", stats=calibrated.folder)

    @pytest.mark.parametrize(
        ("activations", "rewrite", "most"), one_of([("int8", "none", 1.01), ("int8:static", "smoothquant", 1.02), ("fp8", "none", 1.01)])
    )
    def test_activations_of_8_bits(self, activations: str, rewrite: str, most: float, tmp_path: Path) -> None:
        fmt = "fp8_e4m3_channel" if activations == "fp8" else "int8_channel"
        made = fewbits.quantize(
            embedded.MODEL, tmp_path / "a", to="fewbits", format=fmt, method="rtn", activations=activations, rewrite=rewrite, samples=12,
            length=128, tokens=4000, max_ppl_ratio=most, activations_kl=math.inf,
        )  # fmt: skip
        assert made.verdict is not None and made.verdict.passed, made.verdict.failures
        assert len(made.plan.activations) == 28
        assert all((a.scale is not None) == a.static for a in made.plan.activations.values())
        assert bool(made.rewrites) == (rewrite != "none")

    @pytest.mark.parametrize(("kv", "most"), one_of([("int8", 1.002), ("int4", 1.02)]))
    def test_a_quantized_cache(self, kv: str, most: float, tmp_path: Path) -> None:
        made = fewbits.quantize(
            embedded.MODEL, tmp_path / "a", to="fewbits", format="fp16", method="rtn", kv=kv, tokens=4000, max_ppl_ratio=most
        )
        assert made.verdict is not None and made.verdict.passed and made.verdict.kl_mean > 1e-8

    def test_llama_cpp_takes_no_activations_from_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="by itself"):
            fewbits.quantize(embedded.MODEL, tmp_path / "a.gguf", format="q8_0", activations="int8")
        with pytest.raises(InputError, match="no rewrite"):
            fewbits.quantize(embedded.MODEL, tmp_path / "a.gguf", format="q8_0", rewrite="smooth", samples=2, length=32)


class TestImportanceMatrix:
    def test_llama_cpps_reader_finds_what_was_measured(self, calibrated: calibration.Calibrated) -> None:
        reader = gguf.GGUFReader(calibrated.folder.parent / "imatrix.gguf")
        tensors = {tensor.name: tensor.data for tensor in reader.tensors}
        assert reader.get_field("general.type").contents() == "imatrix"
        seen = calibrated.statistics.input(DOWN)
        mean = tensors["blk.2.ffn_down.weight.in_sum2"] / tensors["blk.2.ffn_down.weight.counts"]
        np.testing.assert_allclose(mean.reshape(-1), seen.mean_square().numpy(), rtol=1e-5)
        assert float(tensors["blk.2.ffn_down.weight.counts"].reshape(-1)[0]) == 12 * 128

    def test_it_guides_a_search(self, calibrated: calibration.Calibrated, embedded_model: model.Model, tmp_path: Path) -> None:
        file = calibrated.folder.parent / "imatrix.gguf"
        made = fewbits.quantize(embedded.MODEL, tmp_path / "a.gguf", format="q4_0", method="rtn", stats=file, no_verify=True)
        weight = next(w for w in embedded_model.weights if w.name == DOWN)
        importance = calibrated.statistics.input(DOWN).mean_square()
        expected = rtn.quantize(embedded_model.load(weight), formats.get("q4_0"), importance)
        assert torch.equal(artifact.Artifact(made.artifact).parts(weight)["blocks"], expected["blocks"])

    def test_the_legacy_form_is_read(self, embedded_model: model.Model, tmp_path: Path) -> None:
        name, values = b"blk.2.ffn_down.weight", np.arange(1, 769, dtype="<f4")
        content = struct.pack("<i", 1) + struct.pack("<i", len(name)) + name + struct.pack("<ii", 4, 768) + values.tobytes()
        (tmp_path / "old.dat").write_bytes(content + struct.pack("<i", 7))
        matrix = ImportanceMatrix(tmp_path / "old.dat", embedded_model)
        seen = matrix.of(DOWN)
        assert seen is not None and seen.input is not None
        torch.testing.assert_close(seen.input.mean_square(), torch.from_numpy(values / 4))
        assert matrix.of("model.layers.0.mlp.up_proj") is None

    @pytest.mark.parametrize("content", [b"", b"\x01\0\0\0", b"\xff" * 64, struct.pack("<iiii", 1, 4, 1, 1 << 30) + b"abcd"])
    def test_anything_else_is_refused(self, content: bytes, embedded_model: model.Model, tmp_path: Path) -> None:
        (tmp_path / "x.dat").write_bytes(content)
        with pytest.raises(InputError):
            ImportanceMatrix(tmp_path / "x.dat", embedded_model)


def test_biases_take_up_the_mean_of_the_errors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=2048, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    theirs = GPT2LMHeadModel(config)
    for name, parameter in theirs.named_parameters():
        if "ln_" in name and name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=1.0)  # inputs with a mean
    theirs.save_pretrained(tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "gpt2" / name).write_bytes((embedded.MODEL / name).read_bytes())
    source = model.open(tmp_path / "gpt2")
    statistics = calibration.collect(source, calibration.draw(source, (), 8, 64, 0), tmp_path / "stats", gradients=False)
    plan = planning.uniform(source.weights, targets.get("gguf"), formats.get("q4_0"))
    made = artifact.quantize(source, plan, tmp_path / "a", silent, statistics)
    weight = next(w for w in source.weights if w.name.endswith("h.1.mlp.c_fc"))
    mean = statistics.input(weight.name).later_mean()
    shift = (made.decoded(weight) - source.load(weight)) @ mean
    before, after = source.tensor(f"{weight.name}.bias"), made.tensor(f"{weight.name}.bias")
    torch.testing.assert_close(before - after, shift, rtol=1e-4, atol=1e-6)
    assert shift.abs().max() > 1e-3


def test_calibration_text_is_never_what_is_judged_on(embedded_model: model.Model, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(embedded.calibration_text()[:40_000])
    for samples in (3, 1000):
        split = split_text(embedded_model, text, (), samples, 64, 0, 640)
        assert split.samples is not None
        assert not {tuple(window) for window in split.windows} & set(split.samples.ids)
    text.write_text("a few words for one short window")
    with pytest.raises(InputError, match="single sample"):
        split_text(embedded_model, text, (), 4, 8, 0, 640)


def test_damaged_statistics_are_named(calibrated: calibration.Calibrated, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"statistics\.json"):
        Statistics(tmp_path)
    (tmp_path / "statistics.json").write_text('{"schema": 1, "weights": 3}')
    with pytest.raises(InputError, match="damaged"):
        Statistics(tmp_path)
    (tmp_path / "statistics.json").write_text((calibrated.folder / "statistics.json").read_text().replace('"schema": 1', '"schema": 9'))
    with pytest.raises(InputError, match="schema 9"):
        Statistics(tmp_path)


def test_feedback_refuses_what_has_no_levels() -> None:
    with pytest.raises(InputError, match="cast"):
        error_feedback.solve(torch.randn(4, 8), formats.get("fp16"), torch.eye(8))


@pytest.mark.slow
def test_tuned_scales_are_nearer_still(tmp_path: Path) -> None:
    """Through the pipeline: codes as they were, scales moved, and what is judged on was not tuned on."""
    options = {"format": "q4_0", "method": "rtn", "samples": 24, "length": 64, "tokens": 2000, "to": "fewbits"}
    plain = fewbits.quantize(embedded.MODEL, tmp_path / "a", **options)
    tuned = fewbits.quantize(embedded.MODEL, tmp_path / "b", **options, tune=20)
    assert plain.verdict and tuned.verdict and tuned.verdict.kl_mean < plain.verdict.kl_mean
    before, after = artifact.Artifact(tuned.artifact.parent / "untuned"), artifact.Artifact(tuned.artifact)
    moved = 0
    for weight in after.weights:
        fmt = formats.get(after.plan[weight.name].format)
        (codes, grid), (new_codes, new_grid) = fmt.unpack(before.parts(weight)), fmt.unpack(after.parts(weight))
        assert torch.equal(codes, new_codes)
        moved += any(not torch.equal(grid[name], new_grid[name]) for name in grid)
    assert moved > 10 and any("tuned" in note for row in tuned.outcomes.values() for note in row.get("notes", ()))


class TestCommands:
    def test_calibrate_prints_a_table_and_merges(self, run, tmp_path: Path) -> None:
        text = tmp_path / "chat.jsonl"
        text.write_text("\n".join(json.dumps({"text": embedded.calibration_text()[i : i + 2000]}) for i in range(0, 40_000, 2000)))
        options = ("--samples", "4", "--length", "64", "--no-gradients", "--no-hessians")
        code, out, err = run("calibrate", embedded.MODEL, "--data", text, "-o", tmp_path / "a", *options)
        assert code == 0 and out == ""
        assert "vocabulary coverage" in err and "chat.jsonl: 100%" in err and "from half of the samples to all" in err
        code, out, _ = run("calibrate", embedded.MODEL, "-o", tmp_path / "b", *options, "--merge", tmp_path / "a", "--json")
        assert code == 0 and [row["samples"] for row in json.loads(out)["runs"]] == [4, 4]
        assert Statistics(tmp_path / "b").input(DOWN).tokens() == 2 * 4 * 64

    def test_compare_ranges_shows_every_estimator(self, run, calibrated: calibration.Calibrated) -> None:
        code, out, _ = run("compare", embedded.MODEL, "--ranges", "--stats", calibrated.folder, "--json")
        rows = json.loads(out)["rows"]
        assert code == 0 and len(rows) == 17 * 7
        assert all(row["clipped"] == 0 for row in rows if row["method"] == "minmax")
        by_method = {name: [row["error"] for row in rows if row["method"] == name] for name in ("mse", "minmax")}
        assert all(ours <= plain * 1.0001 for ours, plain in zip(by_method["mse"], by_method["minmax"], strict=True))
        code, _, err = run("compare", embedded.MODEL, "--ranges")
        assert code == 2 and "fewbits calibrate" in err

    def test_compare_kv_at_several_lengths(self, run) -> None:
        code, out, _ = run("compare", embedded.MODEL, "--kv", "--lengths", "64,96", "--tokens", "190", "--formats", "int8,int4", "--json")
        rows = json.loads(out)["rows"]
        assert code == 0 and [(row["format"], row["length"]) for row in rows] == [("int8", 64), ("int8", 96), ("int4", 64), ("int4", 96)]
        assert rows[0]["kl"] < rows[2]["kl"] and rows[1]["kl"] < rows[3]["kl"]

    @pytest.mark.slow
    def test_the_benchmarks_run(self, run, calibrated: calibration.Calibrated, tmp_path: Path) -> None:
        words = ("-o", tmp_path / "b", "--stats", calibrated.folder, "--formats", "q4_0", "--tokens", "1022", "--json")
        code, out, _ = run("bench", "quality", embedded.MODEL, *words)
        (judged,) = json.loads(out)["texts"]
        ratios = {row["maker"]: row["found"]["to_peer"]["kl_ratio"] for row in judged["rows"]}
        assert code == 0 and ratios["ggml + imatrix"] == 1 and ratios["fewbits"] < 0.85
        again = run("bench", "quality", embedded.MODEL, *words)
        assert json.loads(again[1]) == json.loads(out)  # from what was kept
        code, _, err = run("bench", "quality", embedded.MODEL, *words, "--method", "rtn")
        assert code == 2 and "other settings" in err
        code, _, err = run("bench", "quality", embedded.MODEL, "-o", tmp_path / "c", "--formats", "int4_g32")
        assert code == 2 and "q4_0" in err and not (tmp_path / "c").exists()
        code, out, _ = run("bench", "cost", embedded.MODEL, "--samples", "2", "--format", "q8_0", "--json")
        assert code == 0 and json.loads(out)["steps"][0]["name"] == "forward"
