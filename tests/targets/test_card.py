"""The model card beside every output: huggingface_hub reads it, what the source says is carried over, and nothing of this disk is in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import fewbits
from fewbits import embedded
from fewbits.artifact import written
from fewbits.inspection.sizes import size_of
from fewbits.model.checkpoints import cards
from fewbits.targets import card

SOURCE_CARD = """---
license: other
license_name: tiny-license
license_link: https://example.org/license
language: [en, de]
pipeline_tag: text-generation
---
# Tiny
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a folder of the hub's cache has it, with a card of its own."""
    folder = tmp_path_factory.mktemp("hub") / "models--acme--tiny" / "snapshots" / ("ab" * 20)
    shutil.copytree(embedded.MODEL, folder)
    (folder / "README.md").write_text(SOURCE_CARD)
    return folder


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "m.gguf"
    fewbits.quantize(source, path, format="q4_0", override="embed=fp16", method="rtn", tokens=256, length=128, answers=0)
    return path


def test_huggingface_hub_reads_the_card(made: Path) -> None:
    read = ModelCard.load(card.place(made))
    about = read.data.to_dict()
    assert card.place(made).name == "m.gguf.README.md" and not (made.parent / "README.md").exists()
    assert (about["base_model"], about["base_model_relation"], about["quantized_by"]) == ("acme/tiny", "quantized", "fewbits")
    assert (about["license"], about["license_name"], about["license_link"]) == ("other", "tiny-license", "https://example.org/license")
    assert about["library_name"] == "gguf" and about["pipeline_tag"] == "text-generation" and about["language"] == ["en", "de"]
    assert "fewbits" in about["tags"] and about["fewbits_command"].startswith("fewbits quantize ")


def test_the_card_has_figures_plan_commands_and_no_path_of_this_disk(made: Path, source: Path) -> None:
    text = card.place(made).read_text()
    verdict = json.loads((made.parent / "m.gguf.work" / "results.json").read_text())["verdict"]
    for said in (f"{verdict['kl_mean']:.5f}", f"{verdict['bytes']:,} bytes", "llama-server -m m.gguf -c 512", "12 q4_0", "--format q4_0"):
        assert said in text
    assert str(made.parent) not in text and str(source.parent) not in text


def test_an_export_carries_over_what_the_source_said(made: Path, tmp_path: Path) -> None:
    folder = fewbits.export(made, tmp_path / "again.fewbits", to="fewbits")
    about = ModelCard.load(folder / "README.md").data.to_dict()
    assert (about["base_model"], about["license"], about["library_name"]) == ("acme/tiny", "other", "fewbits")
    text = (folder / "README.md").read_text()
    assert "fewbits quantize " in text and "fewbits export artifact -o again.fewbits" in text
    assert "of the file that this one was exported from" in text  # measured in llama.cpp, not in torch


def test_the_card_is_part_of_what_was_written_and_not_of_its_size(made: Path, tmp_path: Path) -> None:
    folder = fewbits.export(made, tmp_path / "ct", to="safetensors")
    assert written.check(folder) and size_of(folder) == sum(file.stat().st_size for file in folder.iterdir() if file.name != "README.md")
    assert fewbits.verify(folder, embedded.MODEL, tokens=128, length=64, no_floor=True).bytes == size_of(folder)


@pytest.mark.parametrize(
    "content",
    [
        '---\nlicense: "mit\\n---\\nevil: yes"\n---\n',
        "---\nlicense: [1, 2\n---\n",
        "---\n- a list\n---\n",
        f"---\nlicense: {'x' * 5000}\n---\n",
        "---\nlicense: {a: b}\nlanguage: {c: d}\n---\n",
        "no card at all",
        "---\n" + "[" * 3000 + "\n---\n",
    ],
)
def test_a_hostile_card_says_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(content)
    (tmp_path / "config.json").write_text("{}")
    assert cards.origin_of(tmp_path) == cards.Origin()


def test_a_name_in_config_is_the_base_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_name_or_path": "acme/other"}')
    assert cards.origin_of(tmp_path).base_model == "acme/other"
    (tmp_path / "config.json").write_text('{"_name_or_path": "/home/me/model"}')
    assert cards.origin_of(tmp_path).base_model is None


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("fewbits quantize /home/me/big -o /tmp/a.gguf", "fewbits quantize big -o a.gguf"),
        ("fewbits quantize acme/tiny -o a.gguf --data code=/home/me/code.txt", "fewbits quantize acme/tiny -o a.gguf --data code=code.txt"),
        ("fewbits quantize ../x -o 'a b.gguf' --override 'mlp=q4_0'", "fewbits quantize x -o 'a b.gguf' --override mlp=q4_0"),
    ],
)
def test_commands_lose_their_folders(command: str, shown: str) -> None:
    assert card.without_paths(command) == shown


def test_export_says_the_next_command(run: Callable[..., tuple[int, str, str]], made: Path, tmp_path: Path) -> None:
    code, out, err = run("export", made, "-o", tmp_path / "b.gguf", "--json")
    told = json.loads(out)
    assert code == 0, err
    assert told["how_to_run"]["context"] == 512 and told["card"] == str(tmp_path / "b.gguf.README.md")
    assert f"llama-server -m {tmp_path / 'b.gguf'} -c 512" in [each["text"] for each in told["how_to_run"]["commands"]]
    code, _, err = run("export", made, "-o", tmp_path / "c.gguf")
    assert code == 0 and f"llama-cli -m {tmp_path / 'c.gguf'} -c 512" in err


@pytest.mark.parametrize("damage", [None, {"kl_mean": "much"}, {"kl_ci95": 3}, {"domains": [1]}])
def test_a_verdict_in_another_form_is_left_out_of_the_card(damage: dict[str, object] | None, made: Path, tmp_path: Path) -> None:
    """fewbits.json of an artifact can be anybody's."""
    folder = fewbits.export(made, tmp_path / "again.fewbits", to="fewbits")
    told = json.loads((folder / "fewbits.json").read_text())
    (verdict,) = told["verdicts"].values()
    told["verdicts"] = {"torch": {"runtime": "torch"} if damage is None else verdict | damage}
    (folder / "fewbits.json").write_text(json.dumps(told))
    text = card.place(fewbits.export(folder, tmp_path / "other.fewbits", to="fewbits")).read_text()
    assert "nothing is known of how close it is" in text
