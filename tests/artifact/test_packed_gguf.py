"""A GGUF as an artifact: its packed rows decode to what gguf's own decoder gives, in the order of the module, and generate the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_models import MODELS, save_random, write

from fewbits import model
from fewbits.artifact.packed_gguf import PackedGguf
from fewbits.inference.engine import run


@pytest.mark.parametrize("name", ["llama", "phi 3", "gemma 3", "gpt2, untied", "qwen2 moe"])
def test_packed_rows_are_those_of_the_module(name: str, tmp_path: Path) -> None:
    source = model.open(save_random(MODELS[name](), tmp_path / "source"))
    _, file = write(source, "q8_0", ["embed|wte=q4_0"], tmp_path / "out")
    packed, reference = PackedGguf(file), model.open(file)
    assert {weight.name for weight in packed.weights} == {weight.name for weight in source.weights}
    for weight in packed.weights:
        assert torch.equal(packed.decoded(weight), reference.load(weight)), weight.name


def test_a_family_beyond_the_native_decoder_runs_too(tmp_path: Path) -> None:
    source = model.open(save_random(MODELS["gemma 3"](), tmp_path / "source"))
    made, file = write(source, "q8_0", [], tmp_path / "out")
    alone = run(file, "Return a copy", max_tokens=4, raw=True)
    assert alone.stats.engine.startswith("transformers") and alone.tokens == run(made.path, "Return a copy", max_tokens=4, raw=True).tokens
