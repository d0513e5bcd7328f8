"""`fewbits publish`: an output with its card to the hub, after what will be sent was shown.

Sent are the files of the output itself and its card as README.md: never a .work folder, a cache, a hidden file or what looks like a secret.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError, MissingError
from fewbits.model.checkpoints import cards
from fewbits.progress import doing, silent
from fewbits.store.files import beside
from fewbits.store.untrusted import first_line
from fewbits.targets import card

if TYPE_CHECKING:
    from fewbits.progress import Progress

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NEVER = re.compile(
    r"^\.|\.work$|\.partial$|\.lock$|^lock$|^cache$|^__pycache__$|token$|\.(env|key|pem)$|^(id_rsa|credentials|\.netrc)", re.IGNORECASE
)
_MAKER = re.compile(r"^quantized_by: .*$", re.MULTILINE)
HINT = "`hf auth login` once, or HF_TOKEN in the environment, with a token that may write"


@dataclass(frozen=True)
class Sent:
    """A file, and what it is called in the repository."""

    path: Path
    name: str
    bytes: int


@dataclass(frozen=True)
class Parcel:
    """What is sent, before it is."""

    repository: str
    private: bool
    files: tuple[Sent, ...]  # without the card
    card: str
    left_out: tuple[str, ...] = ()  # in the folder, and not sent

    @property
    def nbytes(self) -> int:
        return sum(file.bytes for file in self.files) + len(self.card.encode())

    def to_dict(self) -> dict[str, Any]:
        files = [{"name": file.name, "bytes": file.bytes} for file in self.files]
        files.append({"name": card.NAME, "bytes": len(self.card.encode())})
        about = {"repository": self.repository, "private": self.private, "bytes": self.nbytes}
        return about | {"files": files, "left_out": list(self.left_out), "card": self.card}


def parcel(out: str | Path, repository: str, private: bool = False) -> Parcel:
    """What `publish` would send; nothing is sent."""
    path = Path(out)
    if not _ID.fullmatch(repository):
        raise InputError(f"`{repository}` is no name of a repository", "it is owner/name, such as `me/tiny-llama-gguf`")
    if not path.exists():
        raise InputError(f"there is nothing at `{path}`", "give a file or a folder that fewbits wrote")
    if _NEVER.search(path.resolve().name):
        raise InputError(f"`{path}` is a folder that work is done in, not an output", "give the file or folder that was made")
    place = card.place(path)
    if not place.is_file():
        raise InputError(
            f"`{path}` has no model card `{place.name}`", "`fewbits quantize` and `fewbits export` write one: make the file anew"
        )
    files, left_out = _files(path)
    if not files:
        raise InputError(f"`{path}` holds no files to send", "give a file or a folder that fewbits wrote")
    return Parcel(repository, private, files, _card_by(place, repository), left_out)


def publish(
    out: str | Path,
    repository: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    api: Any = None,
    progress: Progress[Any] = silent,
) -> Parcel:
    """Sends a file or a folder with its card to `owner/name` on the hub, where a repository is made if there is none. `dry_run`: only
    says what it would send. `api`: huggingface_hub's `HfApi`, with a token of its own; by default that of the machine."""
    ready = parcel(out, repository, private)
    return ready if dry_run else send(ready, api, progress)


def send(ready: Parcel, api: Any = None, progress: Progress[Any] = silent) -> Parcel:
    from huggingface_hub import CommitOperationAdd, HfApi

    hub = api or HfApi()
    operations = [CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=str(file.path)) for file in ready.files]
    operations.append(CommitOperationAdd(path_in_repo=card.NAME, path_or_fileobj=ready.card.encode()))
    try:
        hub.create_repo(ready.repository, private=ready.private, exist_ok=True, repo_type="model")
        with doing(progress, f"sending {len(operations)} files to {ready.repository}"):
            hub.create_commit(ready.repository, operations, commit_message="Quantized with fewbits", repo_type="model")
    except Exception as failure:
        raise MissingError(f"`{ready.repository}` could not be written: {first_line(failure)}", HINT) from failure
    return ready


def _files(path: Path) -> tuple[tuple[Sent, ...], tuple[str, ...]]:
    if path.is_file():
        found = [each for each in (path, beside(path)) if each.is_file()]
        return tuple(Sent(each, each.name, each.stat().st_size) for each in found), ()
    sent, left_out = [], []
    for each in sorted(path.rglob("*")):
        inside = each.relative_to(path)
        if not each.is_file() or inside == Path(card.NAME):
            continue
        if each.is_symlink() or any(_NEVER.search(part) for part in inside.parts):
            left_out.append(inside.as_posix())
        else:
            sent.append(Sent(each, inside.as_posix(), each.stat().st_size))
    return tuple(sent), tuple(left_out)


def _card_by(place: Path, repository: str) -> str:
    """The card with who publishes it."""
    text = place.read_text(encoding="utf-8")
    if cards.front_matter(place).get("quantized_by") != card.MAKER:
        return text  # somebody wrote it anew
    return _MAKER.sub(lambda _: f"quantized_by: {json.dumps(repository.partition('/')[0])}", text, count=1)
