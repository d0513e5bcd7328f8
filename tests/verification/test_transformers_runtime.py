"""transformers as a judge: which folders it takes, what it refuses, and that its cache changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import by_transformers, recomputed
from transformers import AutoModelForCausalLM, LlamaConfig

from fewbits import artifact, formats, model, planning, progress
from fewbits.errors import InputError, MissingError
from fewbits.targets.compressed_tensors import TARGET, schemes
from fewbits.verification import runtimes
from fewbits.verification.runtimes.torch import of_module

pytest.importorskip("compressed_tensors")

JUDGE = runtimes.get("transformers")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> model.Model:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, initializer_range=0.3, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("source")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return model.open(folder)


@pytest.fixture(scope="module")
def folder(source: model.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written")
    plan = planning.uniform(source.weights, TARGET, formats.get("int4_g32"))
    TARGET.write(artifact.quantize(source, plan, path / "artifact", progress.silent), path / "model.ct", progress.silent)
    return path / "model.ct"


def test_it_takes_checkpoints_and_leaves_artifacts_to_torch(folder: Path, source: model.Model, tmp_path: Path) -> None:
    assert runtimes.for_file(folder) is JUDGE and JUDGE.takes(source.path)
    assert runtimes.for_file(folder.parent / "artifact").name == "torch"
    assert not JUDGE.takes(tmp_path) and not JUDGE.takes(folder / "config.json") and not JUDGE.takes(tmp_path / "nothing")


def test_a_float_checkpoint_gives_the_logits_of_the_model(source: model.Model) -> None:
    tokens = [3, 1, 4, 1, 5]
    torch.testing.assert_close(JUDGE.open(source.path, 16).logits(tokens), of_module(source.module()).logits(tokens), rtol=0, atol=0)


def test_generation_with_the_cache_is_that_of_recomputing_everything(folder: Path) -> None:
    session = JUDGE.open(folder, 64)
    for prompt in ([1], [7, 8, 9, 10, 11]):
        assert by_transformers(session, prompt, 12) == recomputed(session, prompt, 12)
    assert session.vocabulary == 160


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    JUDGE.open(folder, 16).logits([1, 2])
    assert capfd.readouterr() == ("", "")


def damaged(folder: Path, to: Path, kind: str) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    file = to / "model.safetensors"
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
        return to
    if kind == "no JSON":
        (to / "config.json").write_text("{")
        return to
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    if kind == "missing":
        del tensors[name]
    elif kind == "unexpected":
        tensors["model.layers.1.mlp.up_proj.other"] = torch.zeros(1)
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file, {"format": "pt"})
    return to


@pytest.mark.parametrize("kind", ["truncated", "no JSON", "missing", "unexpected", "mismatched"])
def test_a_folder_that_does_not_fit_its_config_is_refused_with_a_hint(folder: Path, tmp_path: Path, kind: str) -> None:
    """transformers itself would load three of them, with invented numbers and a warning."""
    with pytest.raises(InputError) as caught:
        JUDGE.open(damaged(folder, tmp_path / "damaged", kind), 16)
    assert caught.value.hint


def test_an_artifact_that_lost_its_fewbits_json_is_named_as_one(source: model.Model, tmp_path: Path) -> None:
    made = artifact.quantize(source, planning.unquantized(source.weights, TARGET), tmp_path / "made", progress.silent)
    (made.path / "fewbits.json").unlink()
    assert JUDGE.takes(made.path)
    with pytest.raises(InputError, match=r"has weights of fewbits, but no fewbits\.json"):
        JUDGE.open(made.path, 16)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        JUDGE.open(tmp_path / "nothing", 16)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    """Makes the package seem to be of another version, or not here."""
    import importlib.metadata

    def pretend(pretended: str | None) -> None:
        def version(name: str) -> str:
            if pretended is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return pretended

        monkeypatch.setattr(importlib.metadata, "version", version)
        schemes.installed.cache_clear()

    yield pretend
    schemes.installed.cache_clear()


@pytest.mark.parametrize(("pretended", "word"), [(None, "not installed"), ("0.15.0.1", "0.15, and 0.16 is needed")])
def test_a_missing_or_old_compressed_tensors_is_refused(installed: Callable[[str | None], None], pretended: str | None, word: str) -> None:
    installed(pretended)
    with pytest.raises(MissingError, match=word) as caught:
        runtimes.needed(JUDGE)
    assert caught.value.hint == "pip install 'fewbits[ct]'"


@pytest.mark.parametrize(("pretended", "reads"), [("0.17.1", False), ("0.18.0", True), ("0.20rc1", True), ("1.0", True)])
def test_widths_that_an_older_version_packs_otherwise_are_refused_before_planning(
    source: model.Model, tmp_path: Path, installed: Callable[[str | None], None], pretended: str, reads: bool
) -> None:
    plan = planning.uniform(source.weights, TARGET, formats.get("int3_g32"))
    TARGET.write(artifact.quantize(source, plan, tmp_path / "artifact", progress.silent), tmp_path / "model.ct", progress.silent)
    installed(pretended)
    assert JUDGE.missing() is None
    (weight,) = [weight for weight in source.weights if weight.name.endswith("1.mlp.up_proj")]
    for name in ("int2_g32", "int4_g32", "int8_g32", "mxfp4"):
        assert TARGET.accepts(weight, formats.get(name)) is None
    for name in ("int3_g32", "int5_g32", "int6_g32"):
        assert (TARGET.accepts(weight, formats.get(name)) is None) == reads
    if not reads:
        assert "0.18" in (TARGET.accepts(weight, formats.get("q5_0")) or "")
        with pytest.raises(MissingError, match="packs 3 bits") as caught:
            JUDGE.open(tmp_path / "model.ct", 16)
        assert caught.value.hint


def test_the_version_names_both_packages() -> None:
    assert JUDGE.version().startswith("transformers 5.") and "compressed-tensors 0." in JUDGE.version()


def test_config_of_the_folder_keeps_what_the_model_said(folder: Path, source: model.Model) -> None:
    ours: Any = json.loads((folder / "config.json").read_text())
    theirs = json.loads((source.path / "config.json").read_text())
    assert {key: value for key, value in ours.items() if key != "quantization_config"} == theirs
