"""Tiny models of many architectures, each through the whole way to a GGUF that llama.cpp runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo.conversion import converter
from zoo.models import MODELS, build
from zoo.trials import Trials

# What fewbits itself says of a model that it cannot take there, each for its reason: the others must become files that pass.
REFUSED = {
    "opt": "OPTForCausalLM is not supported",  # by the converter
    "deepseek_v4": "converter refuses",  # it asks for a key that transformers does not save
    "phimoe": "does not compute with the float file",  # transformers weighs the chosen experts otherwise than llama.cpp
    "falcon_h1_scaled": "are not in `falcon_h1_scaled`",  # the converter multiplies weights by the model's factors
}
# Its experts are MXFP4 in the file that is the source, and llama.cpp multiplies those with activations of 8 bits: no float file's floor.
NOT_FLOAT = ("gpt_oss_published",)
IN_MAKE_TEST = ("qwen3_5", "gpt_oss_published", "deepseek_v3_fp8", "modernbert")
RATIO, SHARE, COSINE = 1.3, 0.01, 0.99


@pytest.fixture(scope="session")
def zoo_converter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converter(tmp_path_factory.mktemp("converter") / "llama.cpp")


@pytest.mark.parametrize("name", [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_an_architecture_is_calibrated_planned_and_run_by_llama_cpp(name: str, tmp_path: Path, zoo_converter: Path) -> None:
    trials = Trials(build(name, tmp_path / name), tmp_path, zoo_converter)
    if MODELS[name].kind == "encoder":
        made = trials.gguf()
        assert made.made, made.said
        assert made.kl is not None and made.floor is not None
        assert 1 - made.kl > COSINE and made.floor < SHARE * made.kl
        return
    calibrated = trials.calibrate()
    assert calibrated.made, calibrated.said
    made = trials.gguf()
    if name in REFUSED:
        assert not made.made and REFUSED[name] in made.said
        return
    assert made.made, made.said
    assert made.kl is not None and made.predicted is not None and made.floor is not None and made.bits is not None
    assert made.bits <= 4.5
    assert 1 / RATIO < made.kl / made.predicted < RATIO
    assert made.floor < SHARE * made.kl or name in NOT_FLOAT
