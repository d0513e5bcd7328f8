from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fewbits import cli, embedded, model


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the tests themselves run side by side


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables that tests recorded with `record_property("table", text)`, whichever worker ran them."""
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for name, text in getattr(report, "user_properties", []):
            if name == "table" and report.when == "call":
                terminalreporter.write_line(text)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: exit code, stdout, stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fewbits", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture(scope="session")
def embedded_model() -> model.Model:
    return model.open(embedded.MODEL)


@pytest.fixture(scope="session")
def narrow_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose 64 and 172 columns divide by no block of 256, and partly by none of 32, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("narrow")
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, folder / name)
    return folder


@pytest.fixture(autouse=True)
def few_words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every verified `quantize` lets both models answer three prompts. How they do that is tested where it belongs."""
    if "test_answers" not in request.node.nodeid:
        monkeypatch.setattr("fewbits.verification.answers.NEW", 3)
