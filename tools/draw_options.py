"""Write every verb's arguments and options into its page under docs/verbs/, from the command line itself.

A page has `<!-- options -->` and `<!-- end of options -->`; what lies between is made here, so that it cannot say anything else than
`fewbits VERB --help` does. A test makes the pages anew and compares.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from fewbits import cli

PAGES = Path(__file__).resolve().parent.parent / "docs" / "verbs"
_MARKED = re.compile(r"(<!-- options -->\n).*?(<!-- end of options -->)", re.S)


def verbs() -> dict[str, Any]:
    """The commands of the command line, by name; a group (`bench`) is one verb."""
    commands: dict[str, Any] = get_command(cli.app).commands  # type: ignore[attr-defined]
    return commands


def page(text: str, verb: str) -> str:
    """The page's text with its tables made anew."""
    assert _MARKED.search(text), f"docs/verbs/{verb}.md needs `<!-- options -->` and `<!-- end of options -->`"
    return _MARKED.sub(lambda marked: f"{marked[1]}\n{tables(verb, verbs()[verb])}\n\n{marked[2]}", text)


def tables(name: str, command: Any) -> str:
    inner = getattr(command, "commands", None)
    if inner is None:
        return table(command)
    return "\n\n".join(f"### {name} {one}\n\n{_sentence(each)}\n\n{table(each)}" for one, each in inner.items())


def table(command: Any) -> str:
    rows = ["| option | default | what it does |", "|---|---|---|"]
    rows += [f"| {_names(each)} | {_default(each)} | {_cell(each.help or '')} |" for each in command.params if "--help" not in each.opts]
    return "\n".join(rows)


def _sentence(command: Any) -> str:
    """The first paragraph of what `--help` says."""
    return " ".join((command.help or "").split("\n\n")[0].split())


def _names(option: Any) -> str:
    if option.param_type_name == "argument":
        return f"`{option.metavar or option.name.upper()}`"
    names = sorted(option.opts, key=len)
    value = "" if option.is_flag else " " + (option.metavar or names[-1].lstrip("-").upper())
    return f"`{', '.join(names)}{value}`" + (", repeatable" if option.multiple else "")


def _default(option: Any) -> str:
    if option.required:
        return "required"
    value = option.default() if callable(option.default) else option.default
    return "" if value is None or value is False or value == () or value == [] else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    for verb in verbs():
        place = PAGES / f"{verb}.md"
        if place.is_file():
            place.write_text(page(place.read_text(), verb))
        else:
            print(f"docs/verbs/{verb}.md is missing")


if __name__ == "__main__":
    main()
