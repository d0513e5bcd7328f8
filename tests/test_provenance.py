"""What was written is told from what was changed afterwards, and a verdict never passes with a NaN in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fewbits import provenance
from fewbits.errors import InputError
from fewbits.onnx_files.verifying import _Compared
from fewbits.verification import Measured, Thresholds, Verdict, judge


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


def judged(base: torch.Tensor, test: torch.Tensor, floor: float | None = None) -> Verdict:
    measured = Measured()
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
