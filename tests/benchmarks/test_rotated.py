from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_models import TINY, check_against_llama_cpp, needs_llama_cpp, save_random, write

from fewbits import model
from fewbits.benchmarks.quality.rotated import orthonormal_rows, rotate
from fewbits.errors import InputError

WIDTH, ROTATED, LAYERS = 96, 256, 2
_SHAPE = {**TINY, "hidden_size": WIDTH, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}


def _llama(folder: Path, **changes: Any) -> Path:
    """eps is of the size of the states' mean square: one that is not scaled with the width shows."""
    return save_random(transformers.LlamaConfig(**{**_SHAPE, "rms_norm_eps": 0.1, **changes}), folder)


def _logits(folder: Path) -> torch.Tensor:
    tokens = torch.arange(2, 102).reshape(2, 50) % TINY["vocab_size"]
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits


@pytest.mark.parametrize("tied", [True, False])
def test_a_rotated_model_computes_the_same(tied: bool, tmp_path: Path) -> None:
    plain = _llama(tmp_path / "plain", tie_word_embeddings=tied)
    expected, found = _logits(plain), _logits(rotate(plain, tmp_path / "rotated"))
    # float32 sums of at most so many products, seven in a row per layer
    bound = 7 * LAYERS * ROTATED * torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert float((found - expected).abs().max()) < bound


def test_rows_of_the_rotation_are_orthonormal_and_seeded() -> None:
    q = orthonormal_rows(WIDTH, ROTATED, 0)
    assert float((q @ q.T - torch.eye(WIDTH)).abs().max()) < ROTATED * torch.finfo(torch.float64).eps
    assert torch.equal(q, orthonormal_rows(WIDTH, ROTATED, 0)) and not torch.equal(q, orthonormal_rows(WIDTH, ROTATED, 1))


def test_nothing_is_padded(tmp_path: Path) -> None:
    source = model.open(rotate(_llama(tmp_path / "plain"), tmp_path / "rotated"))
    widths = {weight.name.rsplit(".", 1)[-1]: weight.shape[1] for weight in source.weights}
    assert {name for name, width in widths.items() if width != ROTATED} == {"o_proj", "down_proj"}
    assert widths["o_proj"] == WIDTH and widths["down_proj"] == TINY["intermediate_size"]
    for weight in source.weights:
        w = source.load(weight)
        for lines in (w, w.T):  # columns of what reads the stream, rows of what writes to it
            sizes = lines.norm(dim=1)
            assert float(sizes.min()) > 0.1 * float(sizes.median()), weight.name
    states = source.load(next(weight for weight in source.weights if weight.kind == "embedding"))
    alike = torch.corrcoef(states.T).fill_diagonal_(0).abs().max()
    assert float(alike) < 0.9, "no column is a copy of another"


@needs_llama_cpp
def test_llama_cpp_runs_a_rotated_model(tmp_path: Path) -> None:
    source = model.open(rotate(_llama(tmp_path / "plain"), tmp_path / "rotated"))
    made, file = write(source, "q8_0", [], tmp_path)
    check_against_llama_cpp(made, file)
    assert {weight.name for weight in model.open(file).weights} == {weight.name for weight in source.weights}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (lambda: transformers.Qwen2Config(**TINY), "qwen2"),
        (lambda: transformers.LlamaConfig(**_SHAPE, attention_bias=True), "bias"),
    ],
)
def test_what_is_no_plain_llama_is_refused(config: Callable[[], Any], word: str, tmp_path: Path) -> None:
    source = save_random(config(), tmp_path / "plain")
    with pytest.raises(InputError, match=word):
        rotate(source, tmp_path / "rotated")
    assert not (tmp_path / "rotated").exists()
