"""The next command: the Python ones run here, and the context is what the machine has room for."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig

import fewbits
from fewbits import embedded, targets
from fewbits.devices import host
from fewbits.planning import footprint
from fewbits.targets import running


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "a"
    return fewbits.quantize(embedded.MODEL, path, to="fewbits", format="int4_g32", override="embed=fp16", method="rtn", no_verify=True).path


@pytest.mark.parametrize("name", sorted(targets.all()))
def test_every_target_says_how_its_file_is_run(name: str) -> None:
    for command in targets.get(name).how_to_run(Path("a folder/it's"), 4096, False):
        if command.language == "python":
            assert any(isinstance(node, ast.Constant) and node.value == "a folder/it's" for node in ast.walk(ast.parse(command.text)))
        else:
            assert "a folder/it's" in shlex.split(command.text)


@pytest.mark.parametrize("name", [pytest.param("onnx", marks=pytest.mark.slow), "onnx-genai", "safetensors", "fewbits"])
def test_the_python_commands_run(name: str, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fewbits.export(artifact, tmp_path / ("m.onnx" if name == "onnx" else "m"), to=name)
    how = running.how_to_run(targets.get(name), path, LlamaConfig.from_pretrained(embedded.MODEL))
    commands = [command.text for command in how.commands if command.language == "python"]
    assert commands
    for command in commands:
        space: dict[str, object] = {}
        exec(command, space)
        assert "outputs" in space or "model" in space or running.PROMPT in capsys.readouterr().out


def test_the_context_is_the_largest_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8, intermediate_size=8192,
        vocab_size=32000, max_position_embeddings=32768,
    )  # fmt: skip
    file, shape = tmp_path / "m.gguf", footprint.shape(config)
    file.write_bytes(b"0" * 1_000_000)

    def needed(context: int) -> int:
        return footprint.memory(shape, 1_000_000, footprint.Use(context=context)).total

    for context in (1024, 8192):
        monkeypatch.setattr(host, "total_memory", lambda context=context: int((needed(context) + 1000) / 0.75))
        assert running.fitting_context(config, file) == context
    monkeypatch.setattr(host, "total_memory", lambda: needed(8192) + 1000)  # other programs need some of it
    assert running.fitting_context(config, file) < 8192
    monkeypatch.setattr(host, "total_memory", lambda: 1 << 50)
    assert running.fitting_context(config, file) == 32768
    monkeypatch.setattr(host, "total_memory", lambda: 1000)
    assert running.fitting_context(config, file) is None


def test_an_encoder_is_run_for_its_embeddings() -> None:
    (command,) = targets.get("gguf").how_to_run(Path("e.gguf"), None, True)
    assert command.text.startswith("llama-embedding -m e.gguf")
