"""What a config may say: every one that transformers itself would write, and nothing that is looped over without end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fewbits.errors import InputError
from fewbits.model import limits
from fewbits.store import untrusted


@pytest.mark.slow
def test_no_architecture_is_refused_for_what_it_says_by_default() -> None:
    tried = 0
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # two of them have no defaults
            continue
        limits.check(json.loads(json.dumps(config.to_dict(), default=str)), 0, Path(name))
        tried += 1
    assert tried > 500


@pytest.mark.parametrize(
    "said",
    [
        {"num_hidden_layers": 10**6},
        {"text_config": {"n_layer": -1}},
        {"num_local_experts": 10**6},
        {"num_labels": 10**6},
        {"some_list": [1, 2, 10**9]},
        {"hidden_size": 1 << 40},
        {"eps": [0.1, float("nan")]},
    ],
    ids=json.dumps,
)
def test_what_no_honest_config_says_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="`config` says that"):
        limits.check(said, 10, Path("config"))


@pytest.mark.slow
def test_a_module_of_more_pieces_than_its_file_has_is_not_finished() -> None:
    def build(count: int) -> nn.Module:
        with torch.device("meta"):
            return nn.ModuleList(nn.Linear(1, 1) for _ in range(count))  # three pieces and the list each

    with limits.building(20_000):
        assert len(build(20_000)) == 20_000  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than 50,000"), limits.building(10):
        build(20_000)
    build(20_000)  # nothing is counted afterwards


def test_a_letter_of_four_bytes_makes_all_of_them_so() -> None:
    untrusted.check_decoded(b"x" * (100 << 20), Path("text"))
    with pytest.raises(InputError, match="419,430,416 bytes in memory"):
        untrusted.check_decoded(b"x" * (100 << 20) + "\N{GRINNING FACE}".encode(), Path("text"))
