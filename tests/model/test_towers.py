"""Vision towers: found by a trial with text alone, never rounded, and not in the way of anything that runs the language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from zoo.models import build

from fewbits import formats, planning, targets
from fewbits import model as models
from fewbits.model import reached
from fewbits.model.blocks import Blocks
from fewbits.model.module import skeleton_of
from fewbits.model.weights import TOWER

VISION = ("visi", "visual", "projector", "embed_vision")  # in the names that these architectures have for what reads pictures
MULTIMODAL = ("gemma3", "gemma4", "qwen3_vl", "qwen3_5_moe", "mistral3", "llava", "llama4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: build(name, tmp_path_factory.mktemp("towers") / name) for name in (*MULTIMODAL, "llama", "gpt_oss")}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_text_does_not_reach_what_reads_pictures(name: str, folders: dict[str, Path]) -> None:
    source = models.open(folders[name])
    towers = {weight.name for weight in source.weights if weight.kind == TOWER}
    assert towers and towers == {weight.name for weight in source.weights if any(word in weight.name for word in VISION)}


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])  # a mixture: experts that nobody chose are not unreached
def test_text_reaches_all_of_a_language_model(name: str, folders: dict[str, Path]) -> None:
    config = models.open(folders[name]).config
    assert reached.unreached(skeleton_of(config, folders[name], 1000)) == set()


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_blocks_are_those_that_text_goes_through(name: str, folders: dict[str, Path]) -> None:
    source = models.open(folders[name])
    blocks = Blocks(source)
    assert "language_model" in blocks.path and len(blocks) == source.config.get_text_config().num_hidden_layers
    assert not any(weight.kind == TOWER for weight in blocks.outer_weights)


def test_a_tower_larger_than_the_language_model_is_not_taken_for_it(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    large = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 2, "image_size": 28}
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **small}, vision_config={"model_type": "clip_vision_model", **large}, image_token_index=60
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    assert len(Blocks(models.open(tmp_path))) == 2


def test_towers_are_not_loaded_when_the_language_model_is_run(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.open(folders["gemma3"])
    load, loaded = source.load, set[str]()
    monkeypatch.setattr(source, "load", lambda weight: (loaded.add(weight.kind), load(weight))[1])
    blocks = Blocks(source)
    with torch.no_grad():
        blocks.leave(blocks.enter(torch.arange(4).unsqueeze(0))[0])
    assert loaded == {"embedding"}  # tied to the output


@pytest.mark.parametrize("asked", ["q4_0", "fp16", "int8_channel"])
def test_no_plan_rounds_a_tower(asked: str, folders: dict[str, Path]) -> None:
    source = models.open(folders["llava"])
    plan = planning.uniform(source.weights, targets.get("fewbits"), formats.get(asked))
    for weight in source.weights:
        entry = plan[weight.name]
        if weight.kind != TOWER:
            assert entry.format == asked
        else:
            assert entry.format == weight.dtype == "bf16" and entry.reason.startswith("part of a vision or audio tower")
