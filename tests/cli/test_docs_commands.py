"""Every command and every snippet of README.md and docs/ runs; tests/docs_runner.py says how a page is written for it."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import docs_runner
import pytest
from enumerated import one_of
from test_docs import tool
from typer.main import get_command

import fewbits
from fewbits import cli

_ALWAYS = {"README.md", "docs/index.md", "docs/verbs/fit.md", "docs/course/01-theory.md"}  # the rest: test-all


def _parameters() -> list[object]:
    names = {str(page.relative_to(docs_runner.ROOT)): page for page in docs_runner.pages()}
    return [pytest.param(page, id=name, marks=() if name in _ALWAYS else pytest.mark.slow) for name, page in names.items()]


@pytest.mark.parametrize("page", _parameters())
def test_what_a_page_says_to_type_works(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs_runner.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    docs_runner.Page(page, tmp_path).run()


def test_every_block_names_a_language_that_is_run_or_shown() -> None:
    """A block that names none, or `bash`, would be a command that nobody runs."""
    known = {*docs_runner.RUN, *docs_runner.SHOWN}
    found = {
        f"{page.relative_to(docs_runner.ROOT)}:{block.line}": block.language
        for page in (docs_runner.ROOT / "README.md", *(docs_runner.ROOT / "docs").rglob("*.md"))
        for block in docs_runner.blocks(page)
    }
    assert {where: language for where, language in found.items() if language not in known} == {}


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a page made of this text."""

    def run(text: str) -> None:
        page = tmp_path / "page.md"
        page.write_text(text)
        monkeypatch.setattr(docs_runner, "ROOT", tmp_path)
        (tmp_path / "Makefile").write_text("demo: ready\n\techo\n")
        monkeypatch.chdir(tmp_path)
        docs_runner.Page(page, tmp_path).run()

    return run


def test_commands_and_snippets_share_a_folder_and_a_namespace(ran) -> None:
    ran(
        "```sh\necho one > a.txt\ncat > b.txt <<'END'\ntwo\nEND\nfewbits formats --json > formats.json\n```\n"
        "```python\nfrom pathlib import Path\nwords = Path('a.txt').read_text() + Path('b.txt').read_text()\n```\n"
        "```python\nimport json\nassert words == 'one\\ntwo\\n' and len(json.loads(Path('formats.json').read_text())) > 20\n```\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```sh\nfalse\n```\n", "ended with 1, not 0"),
        ("```sh\nfalse | cat\n```\n", "ended with 1, not 0"),
        ("```sh\ntrue # exit code 1\n```\n", "ended with 0, not 1"),
        ("```sh\nfewbits inspect nothing-here\n```\n", "ended with 2, not 0"),
        ("```sh skip=\"slow\"\nfewbits quantize MODEL --no-such-option\n```\n", "no-such-option"),
        ("```sh skip=\"slow\"\nfewbits bench nothing\n```\n", "bench nothing"),
        ("```sh skip=\"slow\"\nmake nothing\n```\n", "no target"),
        ("```sh skip=\"slow\"\npython examples/nothing.py\n```\n", "there is no"),
        ("```sh skip\nfewbits doctor\n```\n", "needs a reason"),
        ("```python\nassert 1 + 1 == 3, 'wrong sum'\n```\n", "wrong sum"),
        ("```sh\necho a b 1.5\n```\n```text check\na c 1.5\n```\n", "was not printed"),
        ("```sh\necho a; echo b; echo c\n```\n```text check\na\nc\n```\n", "was not printed"),
    ],
)  # fmt: skip
def test_a_page_that_is_wrong_fails(ran, text: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        ran(text)


def test_output_is_compared_but_for_numbers_rules_and_what_is_left_out(ran) -> None:
    ran(
        "```sh\nprintf 'first\\n| a | 2.5 %% |\\n-----\\nmid\\nlast 1e-4 (3 ms) and more\\n'\n```\n\n"
        "```text check\na 7.1 %\n...\nlast 2e-9 (4 ms) ...\n```\n"
        '```sh skip="only read"\nmake demo\nfewbits bench cost MODEL --help\n```\n'
    )


def test_every_verb_has_a_page_with_the_options_it_has() -> None:
    draw = tool("draw_options")
    assert {page.stem for page in draw.PAGES.glob("*.md")} == set(draw.verbs())
    for verb in draw.verbs():
        text = (draw.PAGES / f"{verb}.md").read_text()
        assert text == draw.page(text, verb), "run `python tools/draw_options.py`"


def test_a_table_of_options_says_what_help_says() -> None:
    """By hand, of one verb: `fewbits run`."""
    table = tool("draw_options").table(tool("draw_options").verbs()["run"])
    assert "| `OUT` | required | A .gguf, an output of quantize, its .work folder or artifact. |" in table
    assert "| `--seed SEED` | `0` | Of the choice, where the temperature is above 0. |" in table
    assert "| `--raw` |  | The prompt as it is, without the chat template. |" in table


@pytest.mark.parametrize("script", one_of(["own_format.py", "quantize_and_verify.py", "deploy.py"]))
def test_an_example_runs(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, where torch is loaded already."""
    monkeypatch.setattr(sys, "argv", [script])
    try:
        runpy.run_path(str(docs_runner.ROOT / "examples" / script), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
    assert "KL" in capsys.readouterr().out


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """And asks nothing of the network: no page loads a script, a style, a font or a picture from elsewhere."""
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=docs_runner.ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    for page in site.rglob("*.html"):
        foreign = re.findall(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//[^"'> ]+""", page.read_text())
        assert not foreign, f"{page.relative_to(site)}: {foreign}"


def test_the_results_in_the_docs_are_those_of_the_readme() -> None:
    draw, readme = tool("draw_frontier"), (docs_runner.ROOT / "README.md").read_text()
    found = draw.points(readme)
    assert {"q4_k", "4.5bpw", "q3_k", "q8_0"} <= {name for name, _, _ in found}
    assert draw.PICTURE.read_text() == draw.picture(found), "run `python tools/draw_frontier.py`"
    assert draw.PAGE.read_text() == draw.page(draw.PAGE.read_text(), readme), "run `python tools/draw_frontier.py`"


def test_the_api_page_has_every_public_name() -> None:
    page = (docs_runner.ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: (\S+)$", page, re.M))
    for name, home in fewbits._HOME.items():
        assert f"fewbits.{home}.{name}" in shown, f"docs/api.md lacks `{name}`"
        assert getattr(fewbits, name).__doc__, f"`fewbits.{name}` says nothing of itself"


def test_the_messages_that_troubleshooting_explains_exist() -> None:
    """Each piece of a message between its `...` is in the source, but for what is filled in."""
    source = "".join(path.read_text() for path in (docs_runner.ROOT / "src" / "fewbits").rglob("*.py")).replace("`", "")
    page = (docs_runner.ROOT / "docs" / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (.+?) \| .+ \|$", page, re.M)[1:]
    messages = [span.removeprefix("note: ") for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    pieces = [piece for message in messages for part in message.split("...") if len(piece := part.strip(" :")) > 3]
    assert len(pieces) > 25
    assert [piece for piece in pieces if piece not in source] == []


def test_commands_in_running_text_name_verbs_and_options_that_exist() -> None:
    """They may leave arguments out (`fewbits measure --probes`), so they are not parsed as a whole."""
    pages = [docs_runner.ROOT / "README.md", docs_runner.ROOT / "CONTRIBUTING.md", *(docs_runner.ROOT / "docs").rglob("*.md")]
    spans = [(page.name, span) for page in pages for span in re.findall(r"`fewbits ([a-z][^`\n]*)`", page.read_text())]
    assert len(spans) > 50
    wrong = []
    for page, span in spans:
        command, words = get_command(cli.app), span.split()
        while hasattr(command, "commands") and words and words[0] in command.commands:
            command, words = command.commands[words[0]], words[1:]
        known = {name for option in command.params for name in option.opts} | {"--help"}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        if command.name in (None, "fewbits") or given - known:
            wrong.append(f"{page}: fewbits {span}")
    assert wrong == []
