"""llama.cpp's importance matrix of a mixture: a row and a count for each expert, both ways, in both forms."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_models import MODELS, TEXT, save_random
from typer.testing import CliRunner

import fewbits
from fewbits import calibration, model
from fewbits.calibration.importance_matrix import ImportanceMatrix
from fewbits.cli import app
from fewbits.errors import InputError

GATE = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> calibration.Calibrated:
    place = tmp_path_factory.mktemp("imatrix")
    source = save_random(MODELS["qwen3 moe"](), place / "tiny")
    (place / "text.txt").write_text(TEXT * 20)
    for name in ("imatrix.gguf", "imatrix.dat"):
        made = fewbits.calibrate(
            source, place / name.replace(".", "-"), imatrix=place / name, data=place / "text.txt", samples=2, length=32, no_gradients=True
        )
    return made


def read_by_llama_cpps_rules(path: Path) -> dict[str, np.ndarray]:
    """Importance by tensor, as llama-quantize computes it from either form: what no token went through counts alike."""
    if path.suffix == ".gguf":
        tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
        found = {}
        for name in {name.rpartition(".")[0] for name in tensors}:
            sums, counts = tensors[f"{name}.in_sum2"], tensors[f"{name}.counts"].reshape(-1)
            assert sums.dtype == counts.dtype == np.float32 and sums.size % counts.size == 0
            rows = sums.reshape(counts.size, -1)
            found[name] = np.array([row / count if count > 0 else np.ones_like(row) for row, count in zip(rows, counts, strict=True)])
        return found
    content, at, found = path.read_bytes(), 4, {}
    for _ in range(struct.unpack_from("<i", content)[0]):
        (length,) = struct.unpack_from("<i", content, at)
        name = content[at + 4 : at + 4 + length].decode()
        calls, count = struct.unpack_from("<ii", content, at + 4 + length)
        at += 12 + length + 4 * count
        found[name] = np.frombuffer(content, "<f4", count, at - 4 * count) / calls
    chunks, length = struct.unpack_from("<ii", content, at)
    assert chunks == 2 and len(content) == at + 8 + length
    return found


@pytest.mark.parametrize("name", ["imatrix.gguf", "imatrix.dat"])
def test_llama_cpp_finds_what_was_measured(name: str, calibrated: calibration.Calibrated) -> None:
    found = read_by_llama_cpps_rules(calibrated.folder.parent / name)
    source = model.open(calibrated.folder.parent / "tiny")
    experts = [weight for weight in source.weights if weight.parameter == GATE]
    seen = [calibrated.statistics.input(weight.name) for weight in experts]
    assert sum(one.tokens() for one in seen) == 2 * 2 * 32  # each of 64 tokens goes to two experts
    expected = torch.stack([one.mean_square() if one.tokens() else torch.ones(64) for one in seen]).numpy()
    for tensor in ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"):  # one matrix of ours, two of theirs
        np.testing.assert_allclose(found[tensor].reshape(4, 64), expected, rtol=1e-6)
    # of every product but the router's, whose weights are kept; a lookup is no product
    layers = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    assert set(found) == {f"blk.{i}.{layer}.weight" for i in range(2) for layer in layers} | {"output.weight"}


@pytest.mark.parametrize("name", ["imatrix.gguf", "imatrix.dat"])
def test_each_expert_has_its_own_importance(name: str, calibrated: calibration.Calibrated) -> None:
    source = model.open(calibrated.folder.parent / "tiny")
    matrix = ImportanceMatrix(calibrated.folder.parent / name, source)
    for weight in source.weights:
        found = matrix.of(weight.name)
        if weight.kind == "embedding":
            assert found is None
            continue
        assert found is not None and found.input is not None
        expected = calibrated.statistics.input(weight.name).mean_square()
        torch.testing.assert_close(found.input.mean_square(), expected, rtol=1e-6, atol=0)


def test_an_expert_without_tokens_has_none(calibrated: calibration.Calibrated, tmp_path: Path) -> None:
    source = model.open(calibrated.folder.parent / "tiny")
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "")
    writer.add_tensor("blk.0.ffn_down_exps.weight.in_sum2", np.arange(4 * 32, dtype=np.float32).reshape(4, 32))
    writer.add_tensor("blk.0.ffn_down_exps.weight.counts", np.array([[2], [0], [4], [1]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    matrix = ImportanceMatrix(tmp_path / "one.gguf", source)
    down = "model.layers.0.mlp.experts.down_proj.{}"
    assert matrix.of(down.format(1)) is None and matrix.of(down.format(0)) is not None
    third = matrix.of(down.format(2))
    assert third is not None and third.input is not None
    torch.testing.assert_close(third.input.mean_square(), torch.arange(64, 96) / 4)
    other = model.open(save_random(MODELS["mixtral"](), tmp_path / "other"))
    with pytest.raises(InputError, match=r"has 128 values for .*, the model 384"):
        ImportanceMatrix(tmp_path / "one.gguf", other).of(down.format(0))


def test_the_command_writes_it_and_the_next_one_reads_it(calibrated: calibration.Calibrated, tmp_path: Path) -> None:
    place, run, name = calibrated.folder.parent, CliRunner(), "i.dat"
    data = ["--data", str(place / "text.txt"), "--samples", "2", "--length", "32", "--no-gradients", "--no-hessians"]
    made = run.invoke(app, ["calibrate", str(place / "tiny"), "-o", str(tmp_path / "s"), "--imatrix", str(tmp_path / name), *data])
    assert made.exit_code == 0, made.output
    quantized = ["quantize", str(place / "tiny"), "-o", str(tmp_path / "m.gguf"), "--format", "q4_0", "--method", "rtn"]
    made = run.invoke(app, [*quantized, "--stats", str(tmp_path / name), "--no-verify"])
    assert made.exit_code == 0, made.output
    plain = run.invoke(app, [*quantized[:3], str(tmp_path / "p.gguf"), *quantized[4:], "--no-verify"])
    assert plain.exit_code == 0 and (tmp_path / "p.gguf").read_bytes() != (tmp_path / "m.gguf").read_bytes()
