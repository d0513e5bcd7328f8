"""A verb has the same words on the command line and in Python: `--min-agreement` is `min_agreement=`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from typer.main import get_command

import fewbits
from fewbits import cli
from fewbits.errors import FLAGS, InputError, as_arguments
from fewbits.request import Request

VERBS = get_command(cli.app).commands  # type: ignore[attr-defined]
NO_FUNCTION = {"bench", "doctor", "formats"}  # `fewbits.formats` is the package; the others are about this machine

# How the answer is shown, which a function leaves to its caller; and the caller's own ways to look on.
SHOWN = {"json", "quiet"}
LOOKED_ON = {"progress", "on_text", "on_ready"}
# Options that ask for something else than the verb's own answer. In Python each is a function of its own.
OTHERS = {
    "fit": {"devices"},  # a list: devices.catalogue.all()
    "compare": {"blocks", "kv", "lengths", "levels", "ranges", "stats"},  # error_budget, compare_kv and compare_ranges
    "publish": {"yes"},  # who calls the function has decided
    "plan": {"explain"},  # planning.explanation.explain, of the decision
    "run": {"stats"},  # a field of the result
    "quantize": {"max_error"},  # of .onnx files: onnx_graphs.verbs.quantize
    "verify": {"max_error"},
}
PYTHON_ALONE = {
    "serve": {"api_key"},  # on the command line a variable of the environment: options are seen by everybody on the machine
    "publish": {"api"},  # another client of the hub
    "quantize": {"began"},  # a command knows when it was typed
}


def options(verb: str) -> dict[str, Any]:
    """By the word that a person types."""
    found = {}
    for option in VERBS[verb].params:
        long = [name[2:] for name in option.opts if name.startswith("--")]
        found[long[0].replace("-", "_") if long else option.name] = option
    return {name: option for name, option in found.items() if name != "help"}


def arguments(verb: str) -> set[str]:
    names = set(inspect.signature(getattr(fewbits, verb)).parameters)
    if verb == "compare":  # `--against` makes it a comparison of files
        names |= set(inspect.signature(fewbits.compare_files).parameters) - {"files"}
    return names - {"options"} | {each.name for each in dataclasses.fields(Request)} if verb == "quantize" else names


@pytest.mark.parametrize("verb", sorted(set(VERBS) - NO_FUNCTION))
def test_options_and_arguments_have_the_same_names(verb: str) -> None:
    typed = set(options(verb)) - SHOWN - OTHERS.get(verb, set())
    assert typed == arguments(verb) - LOOKED_ON - PYTHON_ALONE.get(verb, set())
    assert OTHERS.get(verb, set()) <= set(options(verb))


def test_every_verb_is_a_function() -> None:
    assert set(VERBS) - NO_FUNCTION <= set(fewbits.__all__)


def test_flags_are_known_where_messages_are_translated() -> None:
    """A flag is `no_verify=True` for who calls a function, an option with a value `size=`."""
    flags = {name for verb in set(VERBS) - NO_FUNCTION for name, each in options(verb).items() if getattr(each, "is_flag", False)}
    assert flags - SHOWN - {name for names in OTHERS.values() for name in names} == FLAGS


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("give `--size 4.5bpw`, or another `-o`", 'give `size="4.5bpw"`, or another `out=`'),
        ("drop `--offline`; `--tune 0`", "drop `offline=True`; `tune=0`"),
        ("for example `--fits 8GB --context 8192`", 'for example `fits="8GB", context=8192`'),
        ("`--override 'a.*=q4_0'`", '`override="a.*=q4_0"`'),
        (
            "made by `fewbits export --to mlx`, or pip install --upgrade gguf",
            "made by `fewbits export --to mlx`, or pip install --upgrade gguf",
        ),
    ],
)
def test_messages_name_arguments(said: str, read: str) -> None:
    assert as_arguments(said) == read


def test_a_caller_reads_arguments_and_the_command_line_options(run: Any, tmp_path: Any) -> None:
    with pytest.raises(InputError) as refused:
        fewbits.fit(params="7")
    assert "`params=7` has no unit" in str(refused.value)
    with pytest.raises(InputError) as refused:
        fewbits.quantize("MODEL", tmp_path / "m.gguf")
    assert '`size="4.5bpw"`' in refused.value.hint and "--" not in str(refused.value)
    code, _, err = run("fit", "--params", "7")
    assert code == 2 and "`--params 7` has no unit" in err


def test_numbers_are_taken_as_the_command_line_takes_them(tmp_path: Any) -> None:
    asked = Request(model="MODEL", out=tmp_path / "m", fits="8GB", context="8k", memory="2GB", bandwidth="60GB/s")  # type: ignore[arg-type]
    assert (asked.context, asked.memory, asked.bandwidth) == (8192, 2 * 10**9, 60e9)
    assert fewbits.fit(params="7B", memory="8GB", context="8k").context == 8192  # type: ignore[arg-type]
    split = Request(model="MODEL", out=tmp_path / "folder", size="4bpw", split_size="1GB")
    assert split.target.name == "gguf" and split.path == tmp_path / "folder"
    with pytest.raises(InputError, match="memory"):
        Request(model="MODEL", out=tmp_path / "m", size="4bpw", memory="much")  # type: ignore[arg-type]
