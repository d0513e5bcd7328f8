"""What a model's own card or metadata says of it: its license, what it is for, in which language. Carried over into the cards of files.

A card is text of anybody: only short plain words are taken out of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fewbits.model.checkpoints import hub
from fewbits.store.untrusted import read_json

NAME = "README.md"
_MOST = 1 << 20  # bytes of a card, beyond which it is left unread
_WORDS = 200  # characters of a value
_COMMAND = 4000


@dataclass(frozen=True)
class Origin:
    base_model: str | None = None  # owner/name on the hub
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    pipeline_tag: str | None = None
    language: tuple[str, ...] = ()


def origin_of(path: Path) -> Origin:
    """Of a checkpoint folder or a GGUF file."""
    said = _of_gguf(path) if path.is_file() else _of_card(front_matter(path / NAME))
    return replace(said, base_model=hub.repository_of(path) or _named_in_config(path) or said.base_model)


def read(card: Path) -> Origin:
    """What an earlier card of fewbits carried over."""
    return _of_card(front_matter(card))


def front_matter(card: Path) -> dict[str, Any]:
    """The block of YAML at its top; empty if there is none that can be read."""
    from huggingface_hub.repocard import metadata_load

    try:
        if not card.is_file() or card.stat().st_size > _MOST:
            return {}
        return metadata_load(card) or {}
    except Exception:  # a damaged card is no reason to refuse a model
        return {}


def command_in(card: Path) -> str:
    """The command that an earlier card of fewbits names."""
    given = front_matter(card).get("fewbits_command")
    return given if isinstance(given, str) and len(given) <= _COMMAND and given.isprintable() else ""


def _of_card(said: dict[str, Any]) -> Origin:
    language = said.get("language")
    spoken = tuple(word for word in map(_word, language if isinstance(language, list) else [language]) if word)
    base = _word(said.get("base_model")) if said.get("base_model_relation") == "quantized" else None
    words = {key: _word(said.get(key)) for key in ("license", "license_name", "license_link", "pipeline_tag")}
    return Origin(base, **words, language=spoken)


def _of_gguf(path: Path) -> Origin:
    from fewbits.model.gguf import header

    try:
        fields = header.read(path).fields
    except (ValueError, struct.error, OSError):
        return Origin()
    keys = {"license": "general.license", "license_name": "general.license.name", "license_link": "general.license.link"}
    words = {name: _word(fields[key].contents()) if key in fields else None for name, key in keys.items()}
    return Origin(license=words["license"], license_name=words["license_name"], license_link=words["license_link"])


def _named_in_config(path: Path) -> str | None:
    """Some config.json files name the repository that they came from."""
    if not (path / "config.json").is_file():
        return None
    said = read_json(path / "config.json", "fetch it again")
    name = said.get("_name_or_path") if isinstance(said, dict) else None
    known = hub.parse(name) if isinstance(name, str) and len(name) <= _WORDS else None
    return known.repository if known else None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= _WORDS and value.isprintable() else None
