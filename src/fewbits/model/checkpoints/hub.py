"""Models of the hub: how people name them, where the cache has them, and what they are called.

`owner/name`, `owner/name@revision`, or an address that was copied from a browser, of the model, of one of its branches or of one file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.errors import InputError, MissingError
from fewbits.store.untrusted import first_line

_WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "README.md"]  # the card says the license
_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
_ID = re.compile(rf"(?P<owner>{_PART})/(?P<name>{_PART})(?:@(?P<revision>[\w./-]+))?")
# a Path has one slash where an address has two
_ADDRESS = re.compile(r"(?:https?:/{1,2})?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<path>[^?#]+)|hf:/{1,2}(?:models/)?(?P<plain>[^?#]+)")
_CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")


@dataclass(frozen=True)
class HubModel:
    repository: str  # owner/name
    revision: str | None = None  # a branch, a tag or a commit; None: the default branch
    file: str | None = None  # one file of it, a GGUF

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def parse(where: str) -> HubModel | None:
    """None: it is no name of a model on the hub."""
    if address := _ADDRESS.match(where.strip()):
        return _of_address([part for part in (address["path"] or address["plain"]).split("/") if part], where)
    match = _ID.fullmatch(where)
    if match is None or Path(match["owner"]).exists():
        return None
    return HubModel(f"{match['owner']}/{match['name']}", match["revision"])


def _of_address(parts: list[str], where: str) -> HubModel:
    """owner/name, owner/name/tree/REVISION, owner/name/blob/REVISION/FILE (or resolve in the place of blob)."""
    match = _ID.fullmatch("/".join(parts[:2]))
    if match is None or parts[0] in ("datasets", "spaces"):
        raise InputError(f"`{where}` is not the address of a model", "it should look like https://huggingface.co/owner/name")
    revision = match["revision"] or (parts[3] if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve") else None)
    file = "/".join(parts[4:]) if len(parts) > 4 and parts[2] in ("blob", "resolve") else None
    if file is not None and not file.lower().endswith(".gguf"):
        file = None  # config.json and the like: the model that it belongs to is meant
    return HubModel(f"{match['owner']}/{match['name']}", None if revision == "main" else revision, file)


def fetch(model: HubModel, offline: bool) -> Path:
    """Its folder, or its file: from the cache, else downloaded unless `offline`."""
    import huggingface_hub

    def folder(**how: Any) -> str:
        return str(huggingface_hub.snapshot_download(model.repository, revision=model.revision, allow_patterns=_WANTED, **how))

    return _fetched(model, offline, folder if model.file is None else _one_file(model, model.file), "private models need `hf auth login`")


def fetch_config(model: HubModel, offline: bool) -> Path:
    """config.json alone."""
    return _fetched(model, offline, _one_file(model, "config.json"), "or give `--params 7B`")


def _one_file(model: HubModel, name: str) -> Callable[..., str]:
    import huggingface_hub

    def file(**how: Any) -> str:
        return str(huggingface_hub.hf_hub_download(model.repository, name, revision=model.revision, **how))

    return file


def _fetched(model: HubModel, offline: bool, get: Callable[..., str], or_else: str) -> Path:
    try:
        return Path(get(local_files_only=True))
    except Exception as missing:
        if offline:
            raise MissingError(
                f"`{model}` is not in the local cache, and `--offline` forbids the download", "drop `--offline`"
            ) from missing
    try:
        return Path(get())
    except Exception as failure:
        hint = f"check the spelling and the network; {or_else}"
        raise MissingError(f"`{model}` could not be downloaded: {first_line(failure)}", hint) from failure


def name_of(path: Path) -> str:
    """What a model is called: the name of its repository if it lies in the hub's cache, where folders are named by commits; else of its
    file or folder."""
    cached = _CACHED.fullmatch(path.parent.parent.name) if path.parent.name == "snapshots" else None
    return cached["name"] if cached else path.name or path.resolve().name


def repository_of(path: Path) -> str | None:
    """`owner/name` of what lies in the hub's cache."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and (cached := _CACHED.fullmatch(folder.parent.parent.name)):
            return f"{cached['owner']}/{cached['name']}"
    return None
