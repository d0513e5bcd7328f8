"""What an installed package is too old for is refused before the work, with the version that has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fewbits import formats, model, planning, targets
from fewbits.errors import InputError, MissingError
from fewbits.model.weights import Weight
from fewbits.targets import onnx as onnx_target
from fewbits.targets.compressed_tensors import schemes
from fewbits.targets.onnx import versions
from fewbits.verification import runtimes
from fewbits.verification.runtimes import llamacpp


def refused(target: str, fmt: str, kind: str = "mlp") -> str:
    return targets.get(target).accepts(Weight("a", (64, 256), kind, "fp16"), formats.get(fmt)) or ""


@pytest.mark.parametrize("target", ["onnx", "onnx-genai"])
@pytest.mark.parametrize(
    ("installed", "fmt", "kind", "first"),
    [
        ("1.26.0", "int2_g32_asym", "embedding", "1.27"),
        ("1.23.2", "int2_g32_asym", "mlp", "1.24"),
        ("1.22.1", "int4_g32", "embedding", "1.23"),
        ("1.9.0", "int8_g32", "mlp", "1.22"),
        ("1.24.0", "int2_g32_asym", "mlp", None),
        ("1.27.0rc1", "int2_g32_asym", "embedding", None),
        (None, "int2_g32_asym", "embedding", None),
    ],
)
def test_onnxruntime(monkeypatch: pytest.MonkeyPatch, target: str, installed: str | None, fmt: str, kind: str, first: str | None) -> None:
    monkeypatch.setattr(versions, "installed", lambda _: installed)
    why_not = refused(target, fmt, kind)
    assert why_not == "" if first is None else f"onnxruntime {installed} is installed" in why_not and f"from {first} on" in why_not


def test_a_plan_for_a_newer_onnxruntime_is_refused_when_it_is_read(monkeypatch: pytest.MonkeyPatch, embedded_model: model.Model) -> None:
    target = targets.get("onnx")
    text = planning.uniform(embedded_model.weights, target, formats.get("int2_g32_asym")).to_json()
    monkeypatch.setattr(versions, "installed", lambda _: "1.26.0")
    with pytest.raises(InputError, match=r"1.26.0 is installed, and 2-bit embeddings run from 1.27 on"):
        planning.read(text, embedded_model.weights, target)


def test_another_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "installed_version", lambda _: "2025.1.1")
    with pytest.raises(MissingError, match=f"xllamacpp is 2025.1.1, but {llamacpp.VERSION} is needed") as caught:
        runtimes.needed(runtimes.get("llama.cpp"))
    assert caught.value.hint == "pip install 'fewbits[llamacpp]'"


def test_compressed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "installed", lambda: (0, 17, 1))
    assert "0.17.1 packs 3 bits in another way; 0.18 is the first" in refused("safetensors", "int3_g32")
    assert refused("safetensors", "int4_g32") == ""
    monkeypatch.setattr(schemes, "installed", lambda: (0, 15))
    with pytest.raises(MissingError, match=r"compressed-tensors is 0.15, and 0.16 is needed"):
        runtimes.needed(runtimes.get("transformers"))


def test_genai(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, word in ((None, "not installed"), ("0.9.2", "0.11 is needed")):
        monkeypatch.setattr(versions, "installed", lambda _, found=found: found)
        with pytest.raises(MissingError, match=word) as caught:
            runtimes.needed(runtimes.get("onnxruntime-genai"))
        assert caught.value.hint == "pip install 'fewbits[genai]'"


@pytest.mark.parametrize("absent", ["onnx", "onnxscript"])
def test_packages_that_write_onnx(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    monkeypatch.setattr(onnx_target, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(MissingError, match=f"needs the package `{absent}`"):
        config: Any = SimpleNamespace(architectures=["LlamaForCausalLM"], model_type="llama")
        targets.get("onnx").supports(config, None)
