"""The files of a folder for transformers and vLLM: shards, what config.json must say of them, and the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import TOKENS, Written, small_llama, uniform, write

from fewbits import embedded, model, planning, progress, targets
from fewbits.errors import InputError
from fewbits.targets import export
from fewbits.targets.compressed_tensors import PLAN, TARGET, contents, shards
from fewbits.verification import runtimes

compressed_tensors = pytest.importorskip("compressed_tensors")
safetensors = pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> model.Model:
    return small_llama(tmp_path_factory.mktemp("llama"))


def test_many_files_hold_what_one_does(llama: model.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write(llama, uniform(llama, "int4_channel_asym"), tmp_path / "one")
    monkeypatch.setattr(shards, "SHARD_BYTES", 10_000)
    TARGET.write(one.artifact, tmp_path / "many.ct", progress.silent)
    many = Written(llama, one.artifact, tmp_path / "many.ct")
    assert len(list(many.path.glob("*.safetensors"))) > 2
    before, after = one.tensors(), many.tensors()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    open_ = runtimes.get("transformers").open
    torch.testing.assert_close(open_(many.path, 128).logits(TOKENS), open_(one.path, 128).logits(TOKENS), rtol=0, atol=0)


def test_tensors_lie_aligned_and_without_gaps_in_the_file(llama: model.Model, tmp_path: Path) -> None:
    written = write(llama, uniform(llama, "int3_channel"), tmp_path)
    content = (written.path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    about = header.pop("__metadata__")
    assert about["fewbits.source_sha256"] == written.artifact.provenance.sha256 and about["format"] == "pt"
    end = 0
    for name, row in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert row["data_offsets"][0] == end, name
        assert (8 + length + end) % {"I64": 8, "I32": 4, "F32": 4, "F16": 2}[row["dtype"]] == 0, name
        end = row["data_offsets"][1]
    assert 8 + length + end == len(content)


def test_an_unquantized_plan_is_a_plain_checkpoint(llama: model.Model, tmp_path: Path) -> None:
    written = write(llama, planning.unquantized(llama.weights, TARGET), tmp_path)
    assert "quantization_config" not in json.loads((written.path / "config.json").read_text())
    assert model.open(written.path).weights == llama.weights
    assert not contents.is_compressed(written.path)


def edited(written: Written, folder: Path, change: Callable[[Any], None]) -> Path:
    shutil.copytree(written.path, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def four_bits(llama: model.Model, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(llama, uniform(llama, "int4_channel"), tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [("num_bits", 3, "weight_packed"), ("symmetric", False, "weight_zero_point` is missing"), ("type", None, "does not say")],
)
def test_a_config_that_contradicts_the_tensors_is_refused(four_bits: Written, tmp_path: Path, key: str, value: object, word: str) -> None:
    def change(config: Any) -> None:
        weights = config["config_groups"]["group_0"]["weights"]
        weights.update({key: value}) if value is not None else weights.pop(key)

    with pytest.raises(InputError) as caught:
        contents.types(edited(four_bits, tmp_path / "edited", change))
    assert word in str(caught.value) and caught.value.hint


def test_a_layer_that_no_group_names_is_refused(four_bits: Written, tmp_path: Path) -> None:
    folder = edited(four_bits, tmp_path / "edited", lambda config: config["config_groups"]["group_0"]["targets"].pop())
    with pytest.raises(InputError, match="no group"):
        contents.types(folder)
    with pytest.raises(InputError, match="lm_head"):
        runtimes.get("transformers").open(folder, 16)


def test_groups_by_pattern_and_by_class_are_read_too(four_bits: Written, tmp_path: Path) -> None:
    expected = contents.types(four_bits.path)
    for i, targets_ in enumerate((["Linear"], ["re:.*proj$", "lm_head"])):
        folder = edited(four_bits, tmp_path / str(i), lambda c, t=targets_: c["config_groups"]["group_0"].update(targets=t))  # type: ignore[misc]
        assert contents.types(folder) == expected


def test_only_a_folder_that_fewbits_wrote_is_replaced(four_bits: Written, tmp_path: Path) -> None:
    out = tmp_path / "out.ct"
    assert export.export(four_bits.artifact, out) == export.export(four_bits.artifact, out) == out
    (out / PLAN).unlink()
    with pytest.raises(InputError, match="did not make"):
        export.export(four_bits.artifact, out)


Run = Callable[..., tuple[int, str, str]]


def test_the_command_line_quantizes_verifies_and_exports(run: Run, tmp_path: Path) -> None:
    common = ["--to", "safetensors", "--tokens", 512, "--json"]
    code, said, _ = run("quantize", embedded.MODEL, "-o", tmp_path, "--format", "int4_g64", "--method", "rtn", *common)
    result = json.loads(said)
    assert code == 0 and Path(result["file"]) == tmp_path / "model.ct"
    verdict = result["verdict"]
    assert verdict["runtime"] == "transformers" and "compressed-tensors" in verdict["runtime_version"]
    assert verdict["kl_floor"] < 1e-9 < verdict["kl_mean"] < 0.1  # float32 in both; a wrong layout is off by nats
    assert verdict["bytes"] == sum(file.stat().st_size for file in (tmp_path / "model.ct").iterdir() if file.name != "README.md")
    assert abs(verdict["bits_per_weight"] - result["plan"]["bits_per_weight"]) < 0.01
    code, said, _ = run("verify", tmp_path / "model.ct", "--against", embedded.MODEL, "--tokens", 512, "--json")
    assert code == 0 and json.loads(said)["kl_mean"] == verdict["kl_mean"]
    code, _, _ = run("export", result["artifact"], "--to", "safetensors", "-o", tmp_path / "again.ct", "--quiet")
    assert code == 0 and (tmp_path / "again.ct/model.safetensors").read_bytes() == (tmp_path / "model.ct/model.safetensors").read_bytes()
    assert targets.get("safetensors").runtime == runtimes.for_file(tmp_path / "again.ct").name
