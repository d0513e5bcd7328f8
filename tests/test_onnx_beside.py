"""Weights beside the .onnx file, where protobuf would end at 2 GiB: tried with a limit that a small model is above."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fewbits import artifact, formats, model, planning, runtimes
from fewbits.artifact import Artifact
from fewbits.drafting import Draft
from fewbits.errors import InputError
from fewbits.files import Staged
from fewbits.onnx_files.reading import size_of
from fewbits.progress import silent
from fewbits.targets.onnx import Onnx

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


def test_its_size_is_known_before_anything_is_quantized(source: model.Model, made: Artifact, both: tuple[Path, Path]) -> None:
    assert size_of(both[1]) == made.plan.nbytes + Onnx(largest=LIMIT).overhead(Draft(source, made.plan))


def test_a_graph_whose_data_is_gone_is_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copyfile(both[1], tmp_path / "model.onnx")
    with pytest.raises(InputError, match="cannot load"):
        logits(tmp_path / "model.onnx")
