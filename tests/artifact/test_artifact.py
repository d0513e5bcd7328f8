"""The artifact as a product: what its fewbits.json says is true, damage is found, older and newer ones are told apart."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fewbits import artifact, embedded, formats, targets
from fewbits.artifact import Artifact, manifest, outcomes
from fewbits.calibration.folder import Statistics
from fewbits.devices import processor
from fewbits.errors import FewbitsError, InputError
from fewbits.model import Model
from fewbits.planning import uniform
from fewbits.progress import silent
from fewbits.rewrites import Rewrite
from fewbits.rewrites.statistics import Rescaled
from fewbits.targets import export

SHARD = "weights-00001.safetensors"
WEIGHT = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def made(embedded_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Never changed: tests that do take a copy."""
    plan = uniform(embedded_model.weights, targets.get("fewbits"), formats.get("int4_g32"), ["mlp=q4_k", "o_proj=keep"])
    return artifact.quantize(embedded_model, plan, tmp_path_factory.mktemp("made") / "a", silent)


@pytest.fixture
def copied(made: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.path, tmp_path / "copied"))


def about(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "fewbits.json").read_text())
    return content


def say(folder: Path, **changes: Any) -> None:
    (folder / "fewbits.json").write_text(json.dumps(about(folder) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Other tensors, with a size and a hash that say they belong there: what is found then is found in the tensors."""
    tensors = load_file(folder / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD)
    content = (folder / SHARD).read_bytes()
    say(folder, files=about(folder)["files"] | {SHARD: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}})


def as_schema_1(folder: Path) -> None:
    """As the first version wrote them: the place of every tensor in fewbits.json, no hashes, config.json left alone."""
    new, index = about(folder), json.loads((folder / "model.safetensors.index.json").read_text())
    origin = {key: new["provenance"][key] for key in ("source", "sha256", "fewbits")}
    old = {"schema": 1, "provenance": origin, "files": index["weight_map"]} | {key: new[key] for key in ("weights", "rest", "outcomes")}
    (folder / "fewbits.json").write_text(json.dumps(old, indent=1))
    (folder / "model.safetensors.index.json").unlink()
    shutil.copyfile(embedded.MODEL / "config.json", folder / "config.json")


class TestWhatItSays:
    def test_every_file_is_there_with_its_hash(self, made: Artifact) -> None:
        said = about(made.path)["files"]
        assert said.keys() | {"fewbits.json"} == {file.name for file in made.path.iterdir()}
        for name, row in said.items():
            content = (made.path / name).read_bytes()
            assert row == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def test_it_names_its_schema_its_formats_and_who_made_it_of_what(self, made: Artifact, embedded_model: Model) -> None:
        said = about(made.path)
        assert said["schema"] == "2.0" and said["formats"] == {"fp16": 1, "int4_g32": 1, "q4_k": 1}
        assert said["provenance"]["sha256"] == embedded_model.fingerprint and said["provenance"]["kernels"] == processor.ABI
        assert said["provenance"]["calibration"] is None

    def test_the_error_of_every_weight_is_that_of_its_decoded_values(self, made: Artifact, embedded_model: Model) -> None:
        for weight in embedded_model.weights:
            w = embedded_model.load(weight).double()
            error = float(((made.decoded(weight).double() - w) ** 2).sum().sqrt() / (w**2).sum().sqrt())
            assert made.errors[weight.name] == pytest.approx(error, rel=1e-3)  # four digits are written
            assert (error == 0) == weight.name.endswith("o_proj")

    def test_the_index_is_where_the_tensors_are(self, made: Artifact) -> None:
        said = json.loads((made.path / "model.safetensors.index.json").read_text())["weight_map"]
        assert said == {name: file.name for file in made.path.glob("*.safetensors") for name in load_file(file)}
        assert set(said.values()) == {SHARD, "import-fewbits-first.safetensors"}

    def test_large_weights_go_into_several_files(self, embedded_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(artifact, "SHARD_BYTES", 1 << 20)
        plan = uniform(embedded_model.weights, targets.get("fewbits"), formats.get("int8_channel"))
        several = artifact.quantize(embedded_model, plan, tmp_path / "a", silent)
        assert len(several.manifest.shards) == len(list(several.path.glob("*.safetensors"))) > 2
        several.check()

    def test_the_config_is_the_sources_to_all_but_transformers(self, made: Artifact, embedded_model: Model, tmp_path: Path) -> None:
        own, source = json.loads((made.path / "config.json").read_text()), json.loads((embedded.MODEL / "config.json").read_text())
        assert own["quantization_config"]["quant_method"] == "fewbits" and own["dtype"] == "float32"
        assert made.config.to_dict() == embedded_model.config.to_dict() | {"_name_or_path": made.config._name_or_path}
        assert made.config.dtype == torch.float16 and not hasattr(made.config, "quantization_config")
        made.save_assets(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text()) == source
        assert {file.name for file in tmp_path.iterdir()} == {
            "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip

    def test_an_older_spelling_of_the_type_comes_back_as_it_was(self, tmp_path: Path) -> None:
        old = {"model_type": "llama", "torch_dtype": "bfloat16"}
        (tmp_path / "config.json").write_text(json.dumps(old))
        manifest._announce(tmp_path / "config.json")
        assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
        manifest._announce(tmp_path / "config.json")  # and once more: a copy is sealed again
        assert manifest.source_config(json.loads((tmp_path / "config.json").read_text())) == old


class TestCalibration:
    def statistics(self, folder: Path, *hashes: str) -> Statistics:
        folder.mkdir()
        said = {"schema": 1, "weights": {}, "runs": [{"data_sha256": each} for each in hashes]}
        (folder / "statistics.json").write_text(json.dumps(said))
        return Statistics(folder)

    def test_its_text_is_known_by_its_hash(self, tmp_path: Path) -> None:
        one, other, both = (self.statistics(tmp_path / name, *name) for name in ("a", "b", "ab"))
        assert artifact.calibration_hash(None) is None
        assert artifact.calibration_hash(one) == artifact.calibration_hash(Rescaled(one, Rewrite(()))) == "a"
        assert len({artifact.calibration_hash(each) for each in (one, other, both)}) == 3

    def test_it_is_written_down(self, embedded_model: Model, tmp_path: Path) -> None:
        plan = uniform(embedded_model.weights, targets.get("fewbits"), formats.get("fp16"))
        stream = outcomes.independent(embedded_model, plan, None, silent)
        assert artifact.write(embedded_model, plan, tmp_path / "a", stream, "abc").provenance.calibration == "abc"


class TestDamage:
    @pytest.mark.parametrize("name", ["plan.json", "config.json", "tokenizer.json", "model.safetensors.index.json", SHARD])
    def test_a_file_that_is_missing_or_short_is_named_on_opening(self, name: str, copied: Path) -> None:
        content = (copied / name).read_bytes()
        (copied / name).write_bytes(content[:-1])
        with pytest.raises(InputError, match=name):
            Artifact(copied)
        (copied / name).unlink()
        with pytest.raises(InputError, match=name):
            Artifact(copied)

    def test_a_plan_edited_in_place_is_not_what_the_weights_were_made_by(self, copied: Path) -> None:
        text = (copied / "plan.json").read_text()
        (copied / "plan.json").write_text(text.replace("--format int4_g32", "--format int4_g64"))
        with pytest.raises(InputError, match=r"plan\.json` was changed"):
            Artifact(copied)

    def test_one_flipped_bit_among_the_codes_is_found_by_the_check(self, copied: Path) -> None:
        content = bytearray((copied / SHARD).read_bytes())
        content[-1000] ^= 1
        (copied / SHARD).write_bytes(content)
        opened = Artifact(copied)  # sizes and types are right
        with pytest.raises(InputError, match=f"{SHARD}` was changed"):
            opened.check()

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("format", ["int4_g32", "q4_k"])
    def test_a_scale_that_is_not_finite_is_found_by_the_check(self, value: float, format: str, made: Artifact, copied: Path) -> None:
        name = next(entry.weight for entry in made.plan.entries if entry.format == format)

        def damage(tensors: dict[str, torch.Tensor]) -> None:
            if format == "int4_g32":
                tensors[f"{name}.scales"][3, 1] = value
            else:  # the scale of a block of q4_k is its first two bytes
                tensors[f"{name}.blocks"][3, :2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8)

        rewrite(copied, damage)
        with pytest.raises(InputError, match=f"{name}.*not finite"):
            Artifact(copied).check()

    def test_a_norm_that_is_not_finite_is_found_by_the_check(self, copied: Path) -> None:
        rewrite(copied, lambda tensors: tensors.update({"model.norm.weight": torch.full((256,), math.nan)}))
        with pytest.raises(InputError, match=r"model\.norm\.weight"):
            Artifact(copied).check()

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: t.__setitem__(f"{WEIGHT}.scales", t[f"{WEIGHT}.scales"].float()),
            lambda t: t.__setitem__(f"{WEIGHT}.scales", t[f"{WEIGHT}.scales"].bfloat16()),
            lambda t: t.__setitem__(f"{WEIGHT}.codes", t[f"{WEIGHT}.codes"][:-1].clone()),
            lambda t: t.__delitem__(f"{WEIGHT}.codes"),
            lambda t: t.__delitem__("model.norm.weight"),
        ],
    )
    def test_parts_that_are_not_their_formats_are_named_on_opening(self, change: Callable[[Any], None], copied: Path) -> None:
        rewrite(copied, change)
        with pytest.raises(InputError, match=rf"{WEIGHT}|model\.norm\.weight"):
            Artifact(copied)

    @pytest.mark.parametrize("where", ["../weights-00001.safetensors", "/etc/passwd"])
    def test_it_does_not_lead_out_of_its_folder(self, where: str, copied: Path) -> None:
        say(copied, files=about(copied)["files"] | {where: {"bytes": 1, "sha256": ""}})
        with pytest.raises(InputError, match="outside its folder"):
            Artifact(copied)

    @pytest.mark.parametrize("key", ["schema", "provenance", "weights", "rest", "files"])
    @pytest.mark.parametrize("value", [None, 7, "x", {"a": 1}, [3]])
    def test_nonsense_is_refused_with_a_hint(self, key: str, value: Any, copied: Path) -> None:
        say(copied, **{key: value})
        with pytest.raises(InputError) as refused:
            Artifact(copied)
        assert refused.value.hint


class TestVersions:
    def test_a_newer_minor_opens_and_what_it_says_more_is_left_out(self, made: Artifact, copied: Path) -> None:
        said = about(copied)
        weights = [row | {"colour": "blue"} for row in said["weights"]]
        files = {name: row | {"blake3": "?"} for name, row in said["files"].items()}
        say(copied, schema="2.7", weights=weights, files=files, provenance=said["provenance"] | {"who": "?"}, moods=[1, 2])
        newer = Artifact(copied)
        assert newer.manifest.schema == (2, 7)
        assert newer.weights == made.weights and newer.provenance == made.provenance and newer.plan == made.plan

    @pytest.mark.parametrize("schema", ["3.0", "3", 3, "12.1"])
    def test_a_newer_major_is_refused_with_both_versions(self, schema: Any, copied: Path) -> None:
        say(copied, schema=schema)
        with pytest.raises(InputError, match=f"schema {schema}, this fewbits reads up to schema 2.0"):
            Artifact(copied)

    def test_a_newer_layout_of_a_format_is_refused_with_both_versions(self, copied: Path) -> None:
        say(copied, formats={"int4_g32": 1, "q4_k": 2})
        with pytest.raises(InputError, match="q4_k in version 2, this fewbits reads version 1"):
            Artifact(copied)

    def test_a_format_of_the_future_is_refused_by_name(self, copied: Path) -> None:
        say(copied, formats={"int4_g32": 1, "int1_magic": 1})
        with pytest.raises(InputError, match="int1_magic, a format that this fewbits does not know"):
            Artifact(copied)

    def test_one_of_the_first_schema_still_opens(self, made: Artifact, copied: Path) -> None:
        as_schema_1(copied)
        old = Artifact(copied)
        assert old.weights == made.weights and old.plan == made.plan and old.outcomes == made.outcomes
        assert old.provenance.sha256 == made.provenance.sha256 and old.provenance.kernels is None
        assert old.config.to_dict() == made.config.to_dict() | {"_name_or_path": old.config._name_or_path}
        for weight in made.weights:
            assert torch.equal(old.decoded(weight), made.decoded(weight))
        old.check()

    def test_exporting_one_of_the_first_schema_brings_it_up_to_date(self, made: Artifact, copied: Path, tmp_path: Path) -> None:
        as_schema_1(copied)
        new = Artifact(export.export(copied, tmp_path / "new.fewbits"))
        assert new.manifest.schema == (2, 0) and new.manifest.formats == made.manifest.formats and new.plan == made.plan
        assert about(new.path)["files"][SHARD] == about(made.path)["files"][SHARD]
        assert json.loads((new.path / "config.json").read_text()) == json.loads((made.path / "config.json").read_text())

    def test_a_copy_of_damaged_weights_is_not_made(self, copied: Path, tmp_path: Path) -> None:
        content = bytearray((copied / SHARD).read_bytes())
        content[-1000] ^= 1
        (copied / SHARD).write_bytes(content)
        with pytest.raises(InputError, match="was changed"):
            export.export(copied, tmp_path / "new.fewbits")
        assert not (tmp_path / "new.fewbits").exists()


class TestVerdicts:
    def test_the_latest_of_every_runtime_is_kept(self, copied: Path) -> None:
        before = {file.name: file.read_bytes() for file in copied.iterdir() if file.name != "fewbits.json"}
        artifact.add_verdict(copied, {"runtime": "torch", "kl_mean": 0.5, "passed": False})
        artifact.add_verdict(copied, {"runtime": "llama.cpp", "kl_mean": 0.2, "kl_max": math.inf, "passed": True})
        artifact.add_verdict(copied, {"runtime": "torch", "kl_mean": 0.1, "passed": True})
        opened = Artifact(copied)
        assert opened.verdicts == {
            "torch": {"runtime": "torch", "kl_mean": 0.1, "passed": True},
            "llama.cpp": {"runtime": "llama.cpp", "kl_mean": 0.2, "kl_max": None, "passed": True},
        }
        assert {file.name: file.read_bytes() for file in copied.iterdir() if file.name != "fewbits.json"} == before
        opened.check()

    def test_one_of_the_first_schema_takes_them_too(self, copied: Path) -> None:
        as_schema_1(copied)
        artifact.add_verdict(copied, {"runtime": "torch", "passed": True})
        assert Artifact(copied).verdicts == {"torch": {"runtime": "torch", "passed": True}}
        assert about(copied)["schema"] == 1

    def test_they_go_with_a_copy(self, copied: Path, tmp_path: Path) -> None:
        artifact.add_verdict(copied, {"runtime": "torch", "passed": True})
        assert Artifact(export.export(copied, tmp_path / "new.fewbits")).verdicts == {"torch": {"runtime": "torch", "passed": True}}

    def test_a_full_disk_leaves_it_as_it_was(self, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = {file.name: file.read_bytes() for file in copied.iterdir()}

        def full(self: Path, text: str) -> None:
            self.write_bytes(text[:10].encode())
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(FewbitsError, match="disk is full"):
            artifact.add_verdict(copied, {"runtime": "torch"})
        assert {file.name: file.read_bytes() for file in copied.iterdir()} == before


def test_an_artifact_is_replaced_only_by_a_whole_one(copied: Path, embedded_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step fails: the old one is back under its name, and nothing lies around."""
    rename = Path.replace
    plan = uniform(embedded_model.weights, targets.get("fewbits"), formats.get("fp16"))

    def fails(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="Input/output"):
        artifact.quantize(embedded_model, plan, copied, silent)
    monkeypatch.undo()
    assert Artifact(copied).plan[WEIGHT].format == "int4_g32" and list(copied.parent.iterdir()) == [copied]
    artifact.quantize(embedded_model, plan, copied, silent)
    assert Artifact(copied).plan[WEIGHT].format == "fp16" and list(copied.parent.iterdir()) == [copied]
