"""llama.cpp's converter in a process of its own: what it sees, what it is told, and what becomes of its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fewbits.errors import InputError, MissingError
from fewbits.model.gguf import conversion

# Stands for the converter: writes down what it was given, in the place of a GGUF.
SCRIPT = """
import argparse, json, os
from pathlib import Path
from conversion import get_model_class
from conversion.base import ModelBase, TextModel

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--outfile")
parser.add_argument("--outtype")
words = parser.parse_args()
folder = Path(words.model)
Path(words.outfile).write_text(json.dumps({
    "files": sorted(file.name for file in folder.iterdir()), "type": words.outtype, "offline": os.environ["HF_HUB_OFFLINE"],
    "rules": TextModel().get_vocab_base_pre("tokenizer"), "settings": (settings := ModelBase.load_hparams(folder, False)),
    "left_out": settings["renamed"],
    "without": get_model_class("Any").no_mtp, "gguf": __import__("gguf").WHERE,
}))
"""
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized")


class ModelBase:
    @staticmethod
    def load_hparams(folder, is_mistral_format):
        return {"rope": {"theta": 1, "kept": 2}, "renamed": 3}  # as a newer transformers reads the file below
"""
PACKAGE = """
class Any:
    supports_mtp_export, no_mtp = True, False


def get_model_class(name, mmproj=False):
    return Any
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "llama.cpp"
    (root / "conversion").mkdir(parents=True)
    (root / "gguf-py" / "gguf").mkdir(parents=True)
    (root / "convert_hf_to_gguf.py").write_text(SCRIPT)
    (root / "conversion" / "__init__.py").write_text(PACKAGE)
    (root / "conversion" / "base.py").write_text(BASE)
    (root / "gguf-py" / "gguf" / "__init__.py").write_text("WHERE = 'beside the converter'")
    return root


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"rope": {"theta": 7}, "named": 4}))
    (folder / "modeling_own.py").write_text("raise SystemExit('remote code ran')")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_the_converter_sees_the_folder_without_code_and_is_told_what_it_would_guess(root: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "float.gguf"
    conversion.convert(model, out, root, "bf16", "qwen2")
    seen = json.loads(out.read_text())
    assert seen["files"] == ["config.json", "model.safetensors"] and seen["type"] == "bf16" and seen["offline"] == "1"
    assert seen["rules"] == "qwen2" and seen["without"] and seen["gguf"] == "beside the converter"
    assert seen["settings"] == {"rope": {"theta": 7}, "named": 4} and seen["left_out"] == 3


def test_rules_that_nobody_recognised_are_the_converters_own_complaint(root: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="BPE pre-tokenizer was not recognized"):
        conversion.convert(model, tmp_path / "float.gguf", root, "fp32")
    assert not (tmp_path / "float.gguf").exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('rotary_pct')", "KeyError: 'rotary_pct'"),
        ("assert 1 > 2", "AssertionError at `assert 1 > 2`"),
        ("print('ERROR:hf-to-gguf:Model X is not supported'); raise SystemExit(1)", "Model X is not supported"),
        ("", "it does not say why"),
    ],
)
def test_why_the_converter_stopped_is_said(body: str, said: str, root: Path, model: Path, tmp_path: Path) -> None:
    (root / "convert_hf_to_gguf.py").write_text(body)
    with pytest.raises(InputError) as refused:
        conversion.convert(model, tmp_path / "float.gguf", root, "fp16")
    assert said in str(refused.value)


def test_a_converter_is_found_where_it_is_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert conversion.find(None) is None
    assert conversion.find(root) == conversion.find(root / "convert_hf_to_gguf.py") == root
    kept = tmp_path / "cache" / "fewbits" / "llama-cpp-python-0.3.36"
    kept.mkdir(parents=True)
    (kept / "convert_hf_to_gguf.py").touch()
    assert conversion.find(None) == kept
    monkeypatch.setenv("LLAMA_CPP_ROOT", str(root))
    assert conversion.find(None) == root
    monkeypatch.setenv("LLAMA_CPP_ROOT", str(tmp_path))
    with pytest.raises(MissingError, match="LLAMA_CPP_ROOT"):
        conversion.find(None)
