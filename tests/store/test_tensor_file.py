"""A tensor is what the safetensors package says it is, mapped, and reading it again and again leaves nothing behind."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fewbits.store.dtypes import DTYPES
from fewbits.store.tensor_file import SafetensorError, TensorFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Every type, a scalar, nothing at all; then a header of an odd length, so that no tensor is aligned."""
    values = torch.arange(24, dtype=torch.uint8)
    tensors = {name: values.clone().view(getattr(torch, name)) if name != "bool" else values > 7 for name in DTYPES.values()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "matrix": torch.randn(5, 7)}
    file = tmp_path / "aligned.safetensors"
    save_file(tensors, file, metadata={"about": "this"})
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + length])).encode()
    header += b" " * (1 - len(header) % 2)
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return odd


def test_tensors_are_those_of_the_library(path: Path) -> None:
    ours = TensorFile(path)
    with safe_open(path, framework="pt") as theirs:
        assert set(ours.keys()) == set(theirs.keys()) and ours.metadata() == theirs.metadata() == {"about": "this"}
        for name in ours.keys():  # noqa: SIM118
            mine, other = ours.tensor(name), theirs.get_tensor(name)
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape) and ours.shape(name) == tuple(other.shape)
            assert mine.flatten().view(torch.uint8).tolist() == other.flatten().view(torch.uint8).tolist()


def test_a_tensor_outlives_its_file(path: Path) -> None:
    tensor = TensorFile(path).tensor("matrix")
    before = tensor.clone()
    path.unlink()
    gc.collect()
    assert torch.equal(tensor, before)


def test_reading_leaves_nothing_behind(path: Path) -> None:
    def read(times: int) -> int:
        for _ in range(times):
            file = TensorFile(path)
            for name in file.keys():  # noqa: SIM118
                file.tensor(name)
        gc.collect()
        return sys.getallocatedblocks()

    before = read(3)
    assert read(100) - before < 900  # of 1,800 tensors not one in two; the library's own reader leaves two integers of each


def test_what_is_not_there_or_has_no_type_is_refused(path: Path) -> None:
    with pytest.raises(SafetensorError, match="nothing"):
        TensorFile(path).tensor("nothing")
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"F64", "shape": [3]', b'"C64", "shape": [3]'))
    with pytest.raises(SafetensorError, match="C64"):
        TensorFile(path).tensor("float64")
