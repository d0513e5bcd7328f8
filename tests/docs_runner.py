"""Runs the code of a documentation page, as a reader would who types it in from top to bottom.

The convention, for README.md and every page under docs/:

```sh                   commands, run in order in one scratch folder per page; each must end with exit code 0,
                        or with the one that its comment names: `fewbits verify ... # exit code 1`.
                        The folder holds `MODEL` (the embedded model), `calibration.txt` and `held-out.txt` (its texts).
                        `fewbits` with plain words, and at most `> FILE` behind them, runs in this process (torch is loaded
                        once); all else goes to bash, which may use pipes, loops and here-documents and takes seconds to
                        load torch. A command may go on after a backslash.
```sh skip="reason"     not run (another machine, minutes, a download); every `fewbits` command is still parsed by the real
                        command line, every `make` target must exist, and so must every script that `python` is given.
```python               run in the same folder, between the commands, all blocks of a page in one namespace.
```python skip="..."    only compiled.
```text                 directly after a block: what it printed, standard output and error together. Shown, not compared.
```text check           compared with what was printed: each line must occur, in order, word by word. A word that is a number
                        stands for any number, a line of `...` for any lines, `...` at a line's end for its rest, rules and
                        boxes for nothing.

All but a few pages are left to `make test-all`. Snippets end with asserts where they claim something.
Every fence names its language; `bash`, `shell`, `console` and `py` are refused, because nobody would run them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.main import get_command

from fewbits import cli, embedded

ROOT = Path(__file__).resolve().parent.parent
RUN, SHOWN = ("sh", "python"), ("text", "json", "toml", "yaml", "html", "cpp", "svg")
_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=indent)(?P=marks) *$", re.M | re.S)
_OPTION = re.compile(r'([\w-]+)(?:="([^"]*)")?')
_NUMBER = re.compile(r"[~<>=±(-]*\d[\d.,:]*(e[-+]?\d+)?[)%x,.;:s]*")
_DRAWN = re.compile(r"[─━│┃┌┐└┘├┤┬┴┼╭╮╰╯╴╵╶╷╸╹╺╻┏┓┗┛┡┩╇█▇▆▅▄▃▂▁░▒▓▏▎▍▌▋▊▉|+=*-]+")  # rules, boxes and bars


@dataclass(frozen=True)
class Block:
    """A fenced piece of a page."""

    language: str
    options: dict[str, str]
    text: str
    line: int  # of the page, where the text begins
    follows: bool  # directly after the block before it


@dataclass
class Page:
    """One page and what running it has printed so far."""

    path: Path
    folder: Path
    module: types.ModuleType = field(init=False)

    def __post_init__(self) -> None:
        self.module = types.ModuleType(f"page_{self.path.stem.replace('-', '_')}")

    def run(self) -> None:
        printed = ""
        sys.modules[self.module.__name__] = self.module  # dataclasses look their module up
        try:
            for block in blocks(self.path):
                where = f"{self.path.relative_to(ROOT)}:{block.line}"
                if block.language == "text":
                    if "check" in block.options:
                        assert block.follows, f"{where}: `check` has no block before it"
                        compare(block.text, printed, where)
                elif "skip" in block.options:
                    assert block.options["skip"], f"{where}: skip needs a reason"
                    parse(block, where)
                elif block.language == "sh":
                    printed = "".join(self.command(line, where) for line in commands(block.text))
                elif block.language == "python":
                    printed = self.python(block)
        finally:
            del sys.modules[self.module.__name__]

    def command(self, line: str, where: str) -> str:
        expected = int(found[1]) if (found := re.search(r"#\s*exit code (\d+)", line)) else 0
        plain = plain_words(line)
        code, printed = in_process(*plain) if plain else in_bash(line, self.folder)
        assert code == expected, f"{where}: `{line}` ended with {code}, not {expected}:\n{printed}"
        return printed

    def python(self, block: Block) -> str:
        said = io.StringIO()
        source = "\n" * (block.line - 1) + block.text  # a traceback then names the page's own lines
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            exec(compile(source, str(self.path), "exec"), self.module.__dict__)
        return said.getvalue()


def pages() -> list[Path]:
    """README.md and every page of docs/ that has something to run or to parse."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if any(block.language in RUN for block in blocks(page))]


def blocks(page: Path) -> list[Block]:
    text, found, end = page.read_text(), [], 0
    for fence in _FENCE.finditer(text):
        language, _, rest = fence["info"].strip().partition(" ")
        indent = len(fence["indent"])
        body = "".join(line[indent:] if line.strip() else line for line in fence["text"].splitlines(keepends=True))
        follows = bool(found) and not text[end : fence.start()].strip()
        found.append(Block(language, dict(_OPTION.findall(rest)), body, text.count("\n", 0, fence.start("text")) + 1, follows))
        end = fence.end()
    return found


def prepare(folder: Path) -> None:
    """What every page finds in its scratch folder."""
    shutil.copytree(embedded.MODEL, folder / "MODEL")
    (folder / "calibration.txt").write_text(embedded.calibration_text(), encoding="utf-8")
    (folder / "held-out.txt").write_text(embedded.verification_text(), encoding="utf-8")


def commands(text: str) -> list[str]:
    """A block's commands: lines, joined where they end in a backslash or open a here-document."""
    found: list[str] = []
    lines = iter(text.splitlines())
    for start in lines:
        line = start
        while line.endswith("\\"):
            line = line[:-1] + next(lines).lstrip()
        if opened := re.search(r"<<-?\s*'?(\w+)'?", line):
            for more in lines:
                line += "\n" + more
                if more.strip() == opened[1]:
                    break
        if line.strip() and not line.lstrip().startswith("#"):
            found.append(line)
    return found


def plain_words(line: str) -> tuple[list[str], str] | None:
    """The words of a `fewbits` command that no shell needs to look at, and the file that its output goes to, or nothing."""
    command, _, file = line.partition(" #")[0].rstrip().partition(" > ")
    bare = re.sub(r"'[^']*'|\"[^\"$`]*\"", "", f"{command} {file}")
    if not line.startswith("fewbits ") or re.search(r"[|&;<>()$`*?{}\n]", bare):
        return None
    return shlex.split(command), file.strip()


def in_process(words: list[str], file: str = "") -> tuple[int, str]:
    said, data, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = words
    try:
        with contextlib.redirect_stdout(data if file else said), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
        if file:
            Path(file).write_text(data.getvalue())
    return int(ended.value.code or 0), said.getvalue()


def in_bash(line: str, folder: Path) -> tuple[int, str]:
    here = str(Path(sys.executable).parent)  # where `python` and `fewbits` are
    environment = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, timeout=300, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def parse(block: Block, where: str) -> None:
    """A block that is not run: what can be known of it without running it."""
    if block.language == "python":
        compile(block.text, where, "exec")
        return
    for line in commands(block.text):
        words = shlex.split(line, comments=True)
        if words and words[0] == "make":
            targets = {word for word in words[1:] if "=" not in word}
            known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
            assert targets <= known, f"{where}: no target {targets - known} in the Makefile"
        elif words and words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), f"{where}: there is no {words[1]}"
        elif words and words[0] == "fewbits":
            parse_command(words[1:], f"{where}: `{line}`")


def parse_command(words: list[str], where: str) -> None:
    """As the real command line does, up to calling the verb."""
    command, name = get_command(cli.app), "fewbits"
    try:
        while hasattr(command, "commands"):
            name, words = words[0], words[1:]
            command = command.commands[name]
        with command.make_context(name, list(words)):
            pass
    except Exception as wrong:  # typer raises click's exceptions or, since it brings click with it, its own
        if getattr(wrong, "exit_code", None) != 0:  # --help
            raise AssertionError(f"{where}: {wrong}") from wrong


def compare(expected: str, printed: str, where: str) -> None:
    """Each line that the page shows must come, in order, in what was printed."""
    lines = [shape for line in printed.splitlines() if (shape := _shape(line))]
    at, may_skip = 0, True  # text before the first line shown is skipped: pages are trimmed
    for line in expected.splitlines():
        shape = _shape(line)
        if shape == ["..."]:
            may_skip = True
            continue
        if not shape:
            continue
        found = next((n for n in range(at, len(lines)) if _alike(shape, lines[n])), None)
        shown = "\n".join(" ".join(words) for words in lines[at : at + 8])
        assert found is not None and (may_skip or found == at), f"{where}: `{line}` was not printed; next were\n{shown}"
        at, may_skip = found + 1, False


def _shape(line: str) -> list[str]:
    words = [word for word in line.split() if not _DRAWN.fullmatch(word)]
    return ["0" if _NUMBER.fullmatch(word) else word for word in words]


def _alike(shown: list[str], printed: list[str]) -> bool:
    return printed[: len(shown) - 1] == shown[:-1] if shown[-1] == "..." else shown == printed
