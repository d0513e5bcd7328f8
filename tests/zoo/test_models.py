"""The zoo itself: models are the same every time, sure of something, damaged by rounding but not beside themselves, and use all experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from zoo.models import MODELS, NAMES, build

from fewbits import embedded

QUICK = {"llama", "gpt_oss", "deepseek_v3", "qwen3_5", "gemma4_shared", "bert"}
ROUNDING = 0.08  # relative error of 4 bits and a scale for every 32 weights: range of some 4 sigma / 15 steps / sqrt(12)


def marked(names: list[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


DECODERS = marked([name for name in NAMES if MODELS[name].kind == "decoder" and not MODELS[name].published])
MIXTURES = marked([name for name in NAMES if "experts_per_tok" in str(MODELS[name].settings) and not MODELS[name].published])


def opened(name: str, folder: Path, length: int) -> tuple[Any, Tensor]:
    build(name, folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder).encode(embedded.verification_text())[:length]
    cls = getattr(transformers, MODELS[name].cls)
    return cls.from_pretrained(folder, dtype=torch.float32).eval(), torch.tensor([tokens])


@pytest.mark.parametrize("name", marked(list(NAMES)))
def test_a_model_is_the_same_bytes_every_time(name: str, tmp_path: Path) -> None:
    first, second = (build(name, tmp_path / part) for part in ("first", "second"))
    files = {file.name for file in first.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
    assert sum(file.stat().st_size for file in first.iterdir()) < 14e6


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_sure_of_something_and_rounding_harms_them(name: str, tmp_path: Path) -> None:
    module, tokens = opened(name, tmp_path, 64)
    with torch.no_grad():
        before = module(input_ids=tokens).logits[0].log_softmax(-1)
        torch.manual_seed(0)
        for weight in module.parameters():
            if weight.ndim in {2, 3} and weight.shape[-1] >= 32:
                weight.add_(torch.randn_like(weight) * weight.std() * ROUNDING)
        after = module(input_ids=tokens).logits[0].log_softmax(-1)
    entropy = float(-(before.exp() * before).sum(-1).mean())
    damage = float((before.exp() * (before - after)).sum(-1).mean())
    uniform = float(torch.tensor(float(before.shape[-1])).log())
    assert 1.5 < entropy < uniform - 1
    assert 0.02 < damage < 0.6


@pytest.mark.parametrize("name", MIXTURES)
def test_tokens_are_spread_over_all_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[tuple[int, Tensor]] = []
    find = torch.topk

    def seen(scores: Tensor, *how: Any, **more: Any) -> Any:
        found = find(scores, *how, **more)
        choices.append((scores.shape[-1], found[1]))
        return found

    module, tokens = opened(name, tmp_path, 512)
    monkeypatch.setattr(torch, "topk", seen)
    monkeypatch.setattr(Tensor, "topk", seen)
    with torch.no_grad():
        module(input_ids=tokens)
    counts = [torch.bincount(chosen.flatten(), minlength=among) for among, chosen in choices if chosen.numel() >= tokens.numel()]
    if name != "phimoe":  # has a rule of its own
        assert counts
    assert all(float(count.min() / count.float().mean()) > 0.25 for count in counts)
