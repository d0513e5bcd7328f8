"""What was written is told from what was changed afterwards, and a verdict never passes with a NaN in it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_results
import numpy as np
import pytest
import torch
from mixtures import with_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from fewbits import pipeline
from fewbits.artifact import written as provenance
from fewbits.errors import InputError
from fewbits.onnx_graphs.inputs import Inputs
from fewbits.onnx_graphs.outputs import _Compared
from fewbits.planning.accuracy import Thresholds
from fewbits.reporting.page import checked_json
from fewbits.verification import embeddings
from fewbits.verification.crosscheck import CrossCheck
from fewbits.verification.embeddings import EmbeddingVerdict, MeasuredEmbeddings
from fewbits.verification.metrics import MeasuredLogits, Verdict, judge


@pytest.fixture(params=["file", "file with arrays beside it", "folder"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    if request.param == "folder":
        (path / "inner").mkdir(parents=True)
        (path / "a.bin").write_bytes(b"one")
        (path / "inner" / "b.bin").write_bytes(b"two")
    else:
        path.write_bytes(b"one")
        if "beside" in request.param:
            path.with_name("model.onnx.data").write_bytes(b"two")
    provenance.record(path)
    return path


def some_file(path: Path) -> Path:
    beside = path.with_name(f"{path.name}.data")
    return path / "inner" / "b.bin" if path.is_dir() else beside if beside.is_file() else path


def test_what_is_as_it_was_written_is_known(written: Path) -> None:
    assert provenance.check(written)


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(b"six"),  # of the same size
        lambda file: file.write_bytes(b"three"),
    ],
)
def test_a_changed_file_is_refused_by_name(change: Callable[[Path], object], written: Path) -> None:
    file = some_file(written)
    change(file)
    with pytest.raises(InputError, match=f"{file.name}` was changed after it was written"):
        provenance.check(written)


def test_a_file_that_came_later_is_refused(written: Path) -> None:
    if written.is_dir():
        (written / "c.bin").write_bytes(b"three")
        with pytest.raises(InputError, match=r"`c\.bin` was not there"):
            provenance.check(written)


def test_a_file_that_went_is_refused(tmp_path: Path) -> None:
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / name).write_bytes(b"x")
    provenance.record(tmp_path / "model.onnx")
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(InputError, match="is not there any more"):
        provenance.check(tmp_path / "model.onnx")


def test_nothing_is_claimed_of_what_came_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert not provenance.check(tmp_path / "model.gguf")


def test_a_damaged_record_is_an_error(written: Path) -> None:
    place = written.with_name(f"{written.name}.work") / provenance.NAME
    place.write_text('{"schema": 1, "files": [1]}')
    with pytest.raises(InputError, match="damaged"):
        provenance.check(written)


TARGETS = {"gguf": "out.gguf", "onnx": "out.onnx", "onnx-genai": "out.genai", "safetensors": "out.ct", "fewbits": "out.fewbits"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of which every target takes some weights in 4 bits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=2048,
        max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return with_tokenizer(folder)


@pytest.fixture(scope="module")
def targets(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    for name, file in TARGETS.items():
        pipeline.quantize(tiny, folder / file, to=name, format="int4_g32", method="rtn", no_verify=True)
    return {name: folder / file for name, file in TARGETS.items()}


def with_a_weight_flipped(path: Path) -> Path:
    """One bit of the packed weights, as a disk or a network would: nothing but their values is different. The file that it was in."""
    file = max((each for each in path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size) if path.is_dir() else path
    content = bytearray(file.read_bytes())
    if path.suffix == ".onnx":
        onnx = pytest.importorskip("onnx")
        raw = max((tensor.raw_data for tensor in onnx.load(path).graph.initializer), key=len)
        place = bytes(content).index(raw) + len(raw) // 2
    else:
        place = len(content) - 1000  # tensors come last
    content[place] ^= 1
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("target", TARGETS)
def test_verify_notices_one_flipped_bit_in_the_weights_and_names_the_file(
    target: str, targets: dict[str, Path], tiny: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    path = tmp_path / targets[target].name
    for each in (targets[target], targets[target].with_name(f"{path.name}.work")):
        (shutil.copytree if each.is_dir() else shutil.copyfile)(each, tmp_path / each.name)
    assert provenance.check(path)
    file = with_a_weight_flipped(path)
    code, out, err = run("verify", path, "--against", tiny, "--tokens", 64)
    assert code == 2 and not out
    said = " ".join(err.split())
    assert f"`{file}` was changed" in said and "hint:" in said


def test_a_file_that_is_as_it_was_is_verified(targets: dict[str, Path], tiny: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("verify", targets["gguf"], "--against", tiny, "--tokens", 64, "--no-floor")[0] == 0


def test_of_a_file_that_was_replaced_by_a_run_that_was_stopped_nothing_is_claimed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that it was changed: the hash that is written down is that of the file before it."""
    path, options = tmp_path / "m.gguf", {"method": "rtn", "tokens": 64}
    pipeline.quantize(tiny, path, format="q8_0", no_verify=True, **options)

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "verdict_on", stopped)
    with pytest.raises(KeyboardInterrupt):
        pipeline.quantize(tiny, path, format="q4_0", **options)
    assert not provenance.check(path)
    monkeypatch.undo()
    pipeline.quantize(tiny, path, format="q4_0", no_verify=True, **options)
    assert provenance.check(path)


def test_a_float_onnx_file_made_smaller_is_watched_too(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    onnx = pytest.importorskip("onnx")
    from graphs import X, model, node

    w = np.random.default_rng(0).standard_normal((64, 96)).astype("float32")
    onnx.save(model([node("MatMul", ["x", "w"], ["y"])], {"w": w}, X), tmp_path / "float.onnx")
    assert run("quantize", tmp_path / "float.onnx", "-o", tmp_path / "out.onnx", "--format", "int8_g32", "--method", "rtn")[0] == 0
    assert run("verify", tmp_path / "out.onnx", "--against", tmp_path / "float.onnx")[0] == 0
    with_a_weight_flipped(tmp_path / "out.onnx")
    code, _, err = run("verify", tmp_path / "out.onnx", "--against", tmp_path / "float.onnx")
    assert code == 2 and f"`{tmp_path / 'out.onnx'}` was changed" in " ".join(err.split())


def judged(base: torch.Tensor, test: torch.Tensor, floor: float | None = None) -> Verdict:
    measured = MeasuredLogits()
    measured.add(base, test, torch.zeros(len(base), dtype=torch.int64))
    return judge(measured, Thresholds(), nbytes=1, bits_per_weight=4.0, runtime="r", runtime_version="1", kl_floor=floor)


LOGITS = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


def test_finite_logits_pass() -> None:
    assert judged(LOGITS, LOGITS + 0.1, 0.0).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["file", "float model"])
def test_a_number_that_is_none_fails_without_any_threshold(bad: float, side: str) -> None:
    spoiled = LOGITS.clone()
    spoiled[17, 3] = bad
    verdict = judged(LOGITS, spoiled) if side == "file" else judged(spoiled, LOGITS)
    assert not verdict.passed and any("finite" in failure for failure in verdict.failures)


def test_a_floor_that_is_no_number_fails() -> None:
    assert not judged(LOGITS, LOGITS, math.nan).passed


def test_a_perplexity_beyond_all_numbers_fails_and_is_no_crash() -> None:
    far = LOGITS.clone()
    far[:, 0] -= 1e6
    verdict = judged(LOGITS, far)
    assert not verdict.passed and verdict.ppl == math.inf


@pytest.mark.parametrize(
    ("base", "test", "fine"),
    [
        ([1.0, -math.inf], [1.1, -math.inf], True),  # a mask
        ([1.0, math.nan], [1.0, math.nan], False),
        ([1.0, 2.0], [1.0, math.nan], False),
        ([1.0, 2.0], [1.0, math.inf], False),
        ([1.0, math.inf], [1.0, -math.inf], False),
    ],
)
def test_outputs_of_onnx_files_are_numbers_or_the_same_infinity(base: list[float], test: list[float], fine: bool) -> None:
    compared = _Compared()
    compared.add(np.array(base), np.array(test))
    assert compared.finite == fine


def vectors(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def embedded(base: torch.Tensor, test: torch.Tensor, floor: torch.Tensor | None = None) -> EmbeddingVerdict:
    measured, own = MeasuredEmbeddings("mean"), MeasuredEmbeddings("mean")
    for _ in range(3):
        measured.add(base, test, 4)
        own.add(base, base if floor is None else floor, 4)
    about: dict[str, Any] = {"nbytes": 1, "bits_per_weight": 4.0, "runtime": "r", "runtime_version": "1"}
    return embeddings.judge(measured, Thresholds(), **about, floor=own)


FINE = vectors([1.0, 2.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_embeddings_that_are_no_numbers_fail_wherever_they_are(bad: float) -> None:
    spoiled = vectors([1.0, bad])
    assert embedded(FINE, FINE + 0.1).passed
    for verdict in (embedded(FINE, spoiled), embedded(spoiled, FINE), embedded(FINE, FINE, spoiled)):
        assert not verdict.passed and "finite" in verdict.failures[0]


def test_embeddings_of_zeros_fail_as_nothing_can_be_said_of_them() -> None:
    verdict = embedded(vectors([0.0, 0.0]), FINE)
    assert not verdict.passed and verdict.relative_error == math.inf


@pytest.mark.parametrize("figures", [(math.nan, 1.0, 1.0), (1.0, math.nan, 1.0), (1.0, 1.0, math.nan), (math.inf, math.inf, 0.0)])
def test_nothing_agrees_with_what_is_no_number(figures: tuple[float, float, float]) -> None:
    assert CrossCheck(1e-4, 1e-4, 0.0).agrees and not CrossCheck(*figures).agrees


def identity(scale: float, path: Path, kind: str = "float32") -> Path:
    onnx = pytest.importorskip("onnx")
    given = [onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind)), [4]) for name in "xy"]
    factor = onnx.numpy_helper.from_array(np.array(scale, kind), "s")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Mul", ["x", "s"], ["y"])], "g", given[:1], given[1:], [factor])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9), path)
    return path


@pytest.mark.parametrize(
    ("base", "test", "kind", "passes"),
    [
        (1.0, 1.1, "float32", True),
        (0.0, 1.0, "float32", False),  # no relative error to zeros
        (1e200, 1.1e200, "float64", False),  # squares are beyond all numbers: infinity over infinity
    ],
)
def test_an_onnx_verdict_without_a_number_fails(base: float, test: float, kind: str, passes: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from fewbits.onnx_graphs import outputs

    files = (identity(base, tmp_path / "float.onnx", kind), identity(test, tmp_path / "packed.onnx", kind))
    given = Inputs(({"x": np.arange(1, 5).astype(kind)},), "test", True)
    with np.errstate(over="ignore"):
        verdict = outputs.verify(files[1], files[0], given)
    assert verdict.passed == passes
    numbers = [value for output in verdict.outputs for value in vars(output).values() if isinstance(value, float)]
    assert all(map(math.isfinite, numbers)) == passes


@pytest.mark.parametrize("name", ["kl_mean", "ppl", "kl_p99", "max_logit_diff"])
def test_the_page_believes_no_verdict_with_a_figure_missing(name: str) -> None:
    row: dict[str, Any] = made_results.results()["verdict"]
    assert checked_json.read(Verdict, row).passed
    assert not checked_json.read(Verdict, row | {name: None}).passed and checked_json.read(Verdict, row | {name: None}).failures
    assert not checked_json.read(Verdict, row | {"passed": "yes"}).passed
