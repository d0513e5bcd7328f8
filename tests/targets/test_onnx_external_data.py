"""Weights beside the .onnx file, where protobuf would end at 2 GiB: tried with a limit that a small model is above."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fewbits import artifact, formats, model, planning
from fewbits.artifact import Artifact
from fewbits.artifact.draft import Draft
from fewbits.errors import InputError
from fewbits.formats import Spec
from fewbits.model.onnx import inline_data
from fewbits.model.onnx.external_data import octets
from fewbits.model.onnx.graph import size_of
from fewbits.progress import silent
from fewbits.store.files import Staged, beside
from fewbits.targets.onnx import Onnx, contents
from fewbits.verification import runtimes

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 160}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LIMIT = 20_000
TOKENS = [1, 5, 9, 2, 77]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> model.Model:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **HEADS, initializer_range=0.3, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return model.open(folder)


@pytest.fixture(scope="module")
def made(source: model.Model, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    plan = planning.uniform(source.weights, Onnx(), formats.get("int4_g32"), ("lm_head=keep", "down_proj=int8_g32", "embed=int4_g32_asym"))
    return artifact.quantize(source, plan, tmp_path_factory.mktemp("made") / "artifact", silent)


def written(made: Artifact, path: Path, **how: int) -> Path:
    """As the pipeline writes: under a temporary name, checked, then renamed."""
    target = Onnx(**how)
    with Staged(path) as staged:
        target.write(made, staged, silent)
        target.check(made.plan, made.weights, staged)
    return path


def logits(path: Path) -> torch.Tensor:
    return runtimes.get("onnxruntime").open(path, 64).logits(TOKENS)


@pytest.fixture(scope="module")
def both(made: Artifact, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Tracing takes the time, so there are two files for all tests."""
    whole, apart = (tmp_path_factory.mktemp(name) / "model.onnx" for name in ("whole", "apart"))
    return written(made, whole), written(made, apart, largest=LIMIT)


def test_what_lies_apart_computes_the_same_bits(both: tuple[Path, Path]) -> None:
    names = [[path.name for path in sorted(file.parent.iterdir())] for file in both]
    assert names == [["model.onnx"], ["model.onnx", "model.onnx.data"]]
    assert both[1].stat().st_size < both[0].stat().st_size / 2
    assert torch.equal(*map(logits, both))


def test_every_weight_is_beside_and_has_the_same_values(both: tuple[Path, Path], made: Artifact) -> None:
    whole, apart = ({tensor.name: tensor for tensor in onnx.load(path).graph.initializer} for path in both)
    assert whole.keys() == apart.keys()
    for name, tensor in apart.items():
        assert (onnx.numpy_helper.to_array(tensor) == onnx.numpy_helper.to_array(whole[name])).all(), name
    outside = {tensor.name for tensor in onnx.load(both[1], load_external_data=False).graph.initializer if tensor.external_data}
    assert {name.rpartition(".")[0] for name in outside} == {weight.name for weight in made.weights}


@pytest.mark.slow
def test_its_size_is_known_before_anything_is_quantized(source: model.Model, made: Artifact, both: tuple[Path, Path]) -> None:
    assert size_of(both[0]) == made.plan.nbytes + Onnx().overhead(Draft(source, made.plan))
    assert size_of(both[1]) == made.plan.nbytes + Onnx(largest=LIMIT).overhead(Draft(source, made.plan))


def test_a_file_that_was_written_piece_by_piece_is_one_message(both: tuple[Path, Path]) -> None:
    onnx.checker.check_model(both[0], full_check=True)
    content = both[0].read_bytes()
    assert onnx.load_from_string(content).ByteSize() == len(content)


def test_one_array_is_in_memory_at_a_time(tmp_path: Path) -> None:
    specs = {f"a{size}": Spec("float32", (size, 3)) for size in (0, 1, 40, 200, 70_000)}
    alive = weakref.WeakSet[torch.Tensor]()

    def arrays() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in specs.items():
            assert not alive
            tensor = torch.full(spec.shape, float(spec.shape[0]))
            alive.add(tensor)
            yield name, tensor
            del tensor

    proto = onnx.ModelProto(ir_version=8)
    proto.graph.name = "g"
    path = tmp_path / "m.onnx"
    with path.open("wb") as stream:
        inline_data.write(stream, proto, specs, arrays())
    assert path.stat().st_size == inline_data.nbytes(proto, specs)
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    assert found.keys() == specs.keys()
    assert all(array.shape == specs[name].shape and (array == array.shape[0]).all() for name, array in found.items())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.tensor([3.0]).expand(1, 1),
        torch.tensor([[1.0], [2.0]]).expand(2, 5),
        torch.arange(6.0).view(2, 3).T,
        torch.ones(0, 3),
    ],
    ids=["number", "one value", "spread", "transposed", "nothing"],
)
def test_values_are_written_in_order_however_they_lie_in_memory(tensor: torch.Tensor) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        assert list(octets(tensor.to(dtype))) == torch.tensor(tensor.flatten().tolist()).to(dtype).view(torch.uint8).tolist()


def test_a_file_is_read_without_its_values(both: tuple[Path, Path]) -> None:
    for path in both:
        whole, bare = onnx.load(path, load_external_data=False), inline_data.read(path)
        inner = [tensor for tensor in whole.graph.initializer if tensor.HasField("raw_data")]
        assert inner
        for tensor in inner:
            tensor.ClearField("raw_data")
        assert bare == whole


@pytest.mark.parametrize(
    "content",
    [b"\x3a\x7f", b"\x3a", b"\x3b\x00", b"\xff" * 11, b"\x3a\x03\x2a\x7f\x00", b"\x39\x00", b"\x08\x01" * (1 << 21)],
    ids=["length beyond its end", "no length", "group", "long number", "array beyond its graph", "half a double", "too many fields"],
)
def test_what_is_no_message_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(InputError, match="cannot be read as ONNX"):
        contents.read(tmp_path / "m.onnx")


def test_a_graph_whose_data_is_gone_is_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copyfile(both[1], tmp_path / "model.onnx")
    with pytest.raises(InputError, match="cannot load"):
        logits(tmp_path / "model.onnx")


def stale(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir() if each != path)


def put(source: Path, path: Path) -> None:
    """The files of a graph that was written before, as the target writes them."""
    with Staged(path) as staged:
        if beside(source).exists():
            shutil.copyfile(beside(source), beside(staged))
        shutil.copyfile(source, staged)


def test_arrays_of_an_earlier_graph_go_when_the_new_one_has_none(both: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    put(both[1], path)
    assert stale(path) == ["model.onnx.data"]
    put(both[0], path)
    assert stale(path) == [] and torch.equal(logits(path), logits(both[0]))


# Writes a pair over whatever is there, and is killed before the n-th renaming or removal.
KILLED = """
import os, signal, sys
from pathlib import Path
from fewbits.store.files import Staged, beside

path, left = Path(sys.argv[1]), int(sys.argv[2])

def dies(call):
    def instead(*given, **named):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **named)
    return instead

with Staged(path) as staged:
    for source, to in ((sys.argv[3], staged), (sys.argv[4], beside(staged))):
        if source:
            to.write_bytes(Path(source).read_bytes())
    os.replace, os.unlink, os.rename = dies(os.replace), dies(os.unlink), dies(os.rename)
"""


def killed_at(step: int, path: Path, source: Path) -> bool:
    arrays = beside(source) if beside(source).exists() else ""
    ended = subprocess.run([sys.executable, "-c", KILLED, path, str(step), source, arrays], check=False)
    assert ended.returncode in (0, -signal.SIGKILL)
    return ended.returncode != 0


@pytest.fixture(scope="module")
def other(source: model.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same graph, other arrays: what one file of each would make is no file at all, and nothing says so."""
    plan = planning.uniform(source.weights, Onnx(), formats.get("int4_g32"), ("lm_head=keep", "down_proj=int8_g32", "embed=int4_g32_asym"))
    folder = tmp_path_factory.mktemp("other")
    module = source.module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    module.to(torch.bfloat16).save_pretrained(folder / "model")
    made = artifact.quantize(model.open(folder / "model"), plan, folder / "artifact", silent)
    return written(made, folder / "model.onnx", largest=LIMIT)


@pytest.mark.parametrize(("before", "after"), [("apart", "other"), ("whole", "other"), ("apart", "whole"), (None, "apart")])
@pytest.mark.slow
def test_killed_at_any_step_a_graph_has_its_own_arrays_or_is_not_there(
    before: str | None, after: str, both: tuple[Path, Path], other: Path, tmp_path: Path
) -> None:
    files = {"whole": both[0], "apart": both[1], "other": other}
    wanted = {name: logits(path) for name, path in files.items()}
    steps = 0
    while True:
        path = tmp_path / str(steps) / "model.onnx"
        if before:
            put(files[before], path)
        path.parent.mkdir(exist_ok=True)
        if not killed_at(steps + 1, path, files[after]):
            break
        steps += 1
        if path.exists():
            found = logits(path)
            assert any(torch.equal(found, wanted[name]) for name in (before, after) if name), f"killed at step {steps}"
        with pytest.raises(InputError, match="later"), Staged(path):  # the next run puts back what was put aside
            raise InputError("later", "")
        assert path.exists() or before is None
        if path.exists():
            found = logits(path)
            assert any(torch.equal(found, wanted[name]) for name in (before, after) if name), f"put back after step {steps}"
        put(files[after], path)
        assert torch.equal(logits(path), wanted[after])
        assert stale(path) == (["model.onnx.data"] if beside(files[after]).exists() else [])
    assert steps >= (1 if before is None else 2)
    assert torch.equal(logits(path), wanted[after]) and [name for name in stale(path) if name.startswith(".")] == []


def test_what_cannot_take_the_place_leaves_the_earlier_pair(
    both: tuple[Path, Path], other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "model.onnx", Path.replace
    put(both[1], path)
    for number in range(4):
        left = [number]

        def fails(self: Path, to: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] == -1:
                raise PermissionError(1, "not now")
            return replace(self, to)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fails)
            with pytest.raises(PermissionError):
                put(other, path)
        assert stale(path) == ["model.onnx.data"] and torch.equal(logits(path), logits(both[1]))
