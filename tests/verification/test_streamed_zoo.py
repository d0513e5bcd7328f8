"""Every architecture of the zoo run block by block gives the bits of the whole module, whatever its blocks hand on to each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from zoo.models import MODELS, build

from fewbits import model as models
from fewbits.model.blocks import Blocks
from fewbits.store.mapped import Room
from fewbits.verification.runtimes import torch as torch_runtime

# of 16 tokens each: of other numbers some state-space models give other bits from one copy of the module to the next
WINDOWS = [list(range(3, 19)), list(range(40, 56)), list(range(1007, 1023))]
EVERYTHING, NOTHING = 1 << 40, 0
FAST = ("lfm2", "falcon_h1", "qwen3_5", "gemma3", "gemma3n", "gemma4_shared", "deepseek_v4")
DECODERS = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n, tiny in MODELS.items() if tiny.kind == "decoder"]

STATES = {  # columns of a state, by what they are: hidden states, handed on, given
    "llama": (256, 0, 0),
    "gemma3n": (4 * 256, 2 * (64 + 64) * 2, 5 * 256),
    "gemma4_shared": (256, 2 * (64 + 64) + 2 * (128 + 128), 4 * 256),
    "deepseek_v4": (4 * 256, 0, 1),
}


@pytest.mark.parametrize("name", DECODERS)
def test_block_by_block_gives_the_bits_of_the_whole_module(name: str, tmp_path: Path) -> None:
    source = models.open(build(name, tmp_path / "model"))
    whole = torch_runtime.of_module(source.module())
    for memory in (EVERYTHING, NOTHING):
        session = torch_runtime.of_model(source)
        for window, parts in zip(WINDOWS, session.each(WINDOWS, Room(tmp_path, memory)), strict=True):
            assert torch.equal(torch.cat(list(parts)), whole.logits(window))
        assert session._made is None  # type: ignore[attr-defined]  # it was not run whole


@pytest.mark.parametrize("name", STATES)
def test_a_state_holds_what_later_blocks_read(name: str, tmp_path: Path) -> None:
    layout = Blocks(models.open(build(name, tmp_path / "model"))).layout
    hidden = layout.hidden.columns
    assert (hidden, layout.changing - hidden, layout.columns - layout.changing) == STATES[name]
    assert layout.is_plain == (name == "llama")
