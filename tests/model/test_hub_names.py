"""Models of the hub by the names that people give them, in a cache laid out as huggingface_hub lays it out. Nothing is downloaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from fewbits import embedded, model, quantize
from fewbits.errors import InputError, MissingError
from fewbits.model.checkpoints import hub
from fewbits.model.checkpoints.hub import HubModel

MAIN, TAGGED = "0" * 39 + "a", "0" * 39 + "b"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`acme/Tiny-1B`, of which a branch and a tag were fetched before: files are links into `blobs`."""
    home = tmp_path / "hub" / "models--acme--Tiny-1B"
    for commit, ref in ((MAIN, "main"), (TAGGED, "v1")):
        snapshot = home / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / ref).write_text(commit)
        (home / "blobs").mkdir(exist_ok=True)
        for file in embedded.MODEL.iterdir():
            shutil.copyfile(file, home / "blobs" / file.name)
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize(
    ("where", "means"),
    [
        ("acme/Tiny-1B", HubModel("acme/Tiny-1B")),
        ("acme/Tiny-1B@v1", HubModel("acme/Tiny-1B", "v1")),
        ("https://huggingface.co/acme/Tiny-1B", HubModel("acme/Tiny-1B")),
        ("https://huggingface.co/acme/Tiny-1B/", HubModel("acme/Tiny-1B")),
        ("huggingface.co/acme/Tiny-1B/tree/main", HubModel("acme/Tiny-1B")),
        ("https://huggingface.co/acme/Tiny-1B/tree/v1", HubModel("acme/Tiny-1B", "v1")),
        ("https://huggingface.co/acme/Tiny-1B/blob/v1/config.json", HubModel("acme/Tiny-1B", "v1")),
        ("https://huggingface.co/acme/Tiny-1B/blob/main/t-Q8_0.gguf?download=true", HubModel("acme/Tiny-1B", None, "t-Q8_0.gguf")),
        ("https://huggingface.co/acme/Tiny-1B/resolve/main/f/t.gguf", HubModel("acme/Tiny-1B", None, "f/t.gguf")),
        ("hf.co/acme/Tiny-1B", HubModel("acme/Tiny-1B")),
        ("hf://acme/Tiny-1B", HubModel("acme/Tiny-1B")),
        ("no-slash", None),
        ("/absolute/path", None),
        ("../up", None),
        ("src/fewbits/embedded", None),
    ],
)
def test_a_name_or_an_address_means_a_model_of_the_hub(where: str, means: HubModel | None) -> None:
    assert hub.parse(where) == means
    if "://" in where:
        assert hub.parse(str(Path(where))) == means, "a Path has one slash where an address has two"


def test_a_dataset_is_no_model() -> None:
    with pytest.raises(InputError, match="not the address of a model"):
        hub.parse("https://huggingface.co/datasets/acme/texts")


@pytest.mark.usefixtures("cached")
def test_a_model_of_the_hub_has_the_name_of_its_repository(tmp_path: Path) -> None:
    import gguf

    source = model.open("acme/Tiny-1B", offline=True)
    assert source.name == "Tiny-1B" and source.path.name == MAIN
    assert model.open("acme/Tiny-1B@v1", offline=True).path.name == TAGGED
    assert model.open("https://huggingface.co/acme/Tiny-1B", offline=True).path.name == MAIN
    made = quantize("acme/Tiny-1B", tmp_path / "m.gguf", format="q4_0", method="rtn", no_verify=True, offline=True)
    fields = gguf.GGUFReader(made.path).fields
    assert fields["general.name"].contents() == "Tiny-1B"
    assert json.loads((made.artifact / "fewbits.json").read_text())["provenance"]["source"] == "acme/Tiny-1B"
    for file in (made.artifact.parent / "results.json", made.artifact.parent / "report.html"):
        assert "Tiny-1B" in file.read_text() and MAIN not in file.read_text(), file.name


@pytest.mark.usefixtures("cached")
def test_inspect_names_the_repository(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("inspect", "https://huggingface.co/acme/Tiny-1B", "--no-values", "--json")
    assert code == 0 and json.loads(out)["path"] == "Tiny-1B"


@pytest.mark.usefixtures("cached")
def test_what_is_not_there_is_said_with_its_revision() -> None:
    with pytest.raises(MissingError, match="`acme/Tiny-1B@v2` is not in the local cache"):
        model.open("acme/Tiny-1B@v2", offline=True)
