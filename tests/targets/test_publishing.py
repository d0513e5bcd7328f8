"""`fewbits publish` against an HfApi that only notes what it is told: what is sent, what never is, and who is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

import fewbits
from fewbits import embedded
from fewbits.errors import InputError, MissingError


class FakeApi:
    def __init__(self, failure: Exception | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failure = failure

    def create_repo(self, repository: str, **how: Any) -> None:
        if self.failure:
            raise self.failure
        self.calls.append(("create", (repository, how["private"], how["exist_ok"])))

    def create_commit(self, repository: str, operations: list[Any], **how: Any) -> None:
        sent = {}
        for each in operations:
            with each.as_file() as stream:
                sent[each.path_in_repo] = stream.read()
        self.calls.append(("commit", (repository, sent)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "m.gguf"
    fewbits.quantize(embedded.MODEL, path, format="q4_0", method="rtn", no_verify=True)
    return path


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    return fake


def test_a_file_goes_with_its_card_as_readme(made: Path) -> None:
    fake = FakeApi()
    fewbits.publish(made, "me/tiny-gguf", private=True, api=fake)
    (_, created), (_, (repository, sent)) = fake.calls
    assert created == ("me/tiny-gguf", True, True) and repository == "me/tiny-gguf"
    assert set(sent) == {"m.gguf", "README.md"} and sent["m.gguf"] == made.read_bytes()
    assert ModelCard(sent["README.md"].decode()).data.to_dict()["quantized_by"] == "me"


def test_a_folder_goes_without_work_caches_and_secrets(made: Path, tmp_path: Path) -> None:
    folder = fewbits.export(made, tmp_path / "m", to="fewbits")
    for name in (".env", ".cache/x", "m.work/cache/y", "my.token", ".git/config", "key.pem"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("secret")
    (folder / "link").symlink_to("/etc/hostname")
    fake = FakeApi()
    parcel = fewbits.publish(folder, "me/tiny", api=fake)
    sent = fake.calls[1][1][1]
    assert {"README.md", "fewbits.json", "config.json", "tokenizer.json"} <= set(sent) and b"secret" not in sent.values()
    assert set(parcel.left_out) == {".env", ".cache/x", "m.work/cache/y", "my.token", ".git/config", "key.pem", "link"}
    assert not set(parcel.left_out) & set(sent) and parcel.nbytes == sum(map(len, sent.values()))


def test_without_a_terminal_nothing_is_sent_unless_told(run: Callable[..., tuple[int, str, str]], api: FakeApi, made: Path) -> None:
    code, _, err = run("publish", made, "me/tiny")
    assert code == 2 and "--yes" in err and "README.md" in err and "base_model" not in err and not api.calls
    code, out, _ = run("publish", made, "me/tiny", "--dry-run", "--json")
    told = json.loads(out)
    assert code == 0 and not told["sent"] and not api.calls
    assert [file["name"] for file in told["files"]] == ["m.gguf", "README.md"] and told["bytes"] > made.stat().st_size
    code, _, err = run("publish", made, "me/tiny", "--yes")
    assert code == 0 and "huggingface.co/me/tiny" in err and [name for name, _ in api.calls] == ["create", "commit"]


@pytest.mark.parametrize(("answer", "sent"), [("y\n", True), ("n\n", False)])
def test_a_terminal_is_asked(
    answer: str, sent: bool, run: Callable[..., tuple[int, str, str]], api: FakeApi, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    typed = io.StringIO(answer)
    typed.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", typed)
    code, _, err = run("publish", made, "me/tiny")
    assert bool(api.calls) == sent and code == (0 if sent else 2) and "for everybody to see?" in err


def test_what_cannot_be_sent_is_refused_with_a_hint(made: Path, tmp_path: Path) -> None:
    for out, repository, said in (
        (made, "tiny", "no name of a repository"),
        (tmp_path / "gone", "me/tiny", "nothing at"),
        (made.with_name("m.gguf.work"), "me/tiny", "work is done in"),
    ):
        with pytest.raises(InputError, match=said):
            fewbits.publish(out, repository, api=FakeApi())
    bare = tmp_path / "x.gguf"
    bare.write_bytes(b"GGUF")
    with pytest.raises(InputError, match="no model card"):
        fewbits.publish(bare, "me/tiny", api=FakeApi())
    with pytest.raises(MissingError, match="could not be written: 401"):
        fewbits.publish(made, "me/tiny", api=FakeApi(RuntimeError("401 Unauthorized")))
