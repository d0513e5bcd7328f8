"""Every command and hash that is needed to make the same file again, and to know that it is the same."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import artifact as artifacts
from fewbits import machines, targets
from fewbits.files import sha256_of
from fewbits.reporting.page.contents import CALIBRATED

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.machines import Machine

_PACKAGES = ("fewbits", "torch", "transformers", "numpy", "gguf", "safetensors")
_SPELLED = {"split": "--split-size", "out": "-o"}
_SILENT = {"executor", "fresh", "memory", "offline", "progress", "store"}  # they change nothing in the result


@dataclass(frozen=True)
class Hash:
    what: str
    sha256: str
    bytes: int | None = None


@dataclass(frozen=True)
class Reproduction:
    commands: tuple[str, ...]
    hashes: tuple[Hash, ...]
    versions: Mapping[str, str]
    machine: Machine | None = None
    caveat: str = ""  # who gets the same bytes


def of(artifact: Artifact, path: Path, commands: Sequence[str]) -> Reproduction:
    origin = artifact.provenance
    hashes = [Hash(f"the model `{origin.source}`", origin.sha256)]
    if origin.calibration:
        hashes.append(Hash(CALIBRATED, origin.calibration))
    plan = artifact.path / artifacts.PLAN
    hashes.append(Hash("plan.json", sha256_of(plan), plan.stat().st_size))
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        name = file.name if file == path else f"{path.name}/{file.relative_to(path)}"
        hashes.append(Hash(f"`{name}`", sha256_of(file), file.stat().st_size))
    return Reproduction(
        tuple(commands), tuple(hashes), _versions(artifact.plan.target), machines.here(), machines.caveat(bool(origin.calibration))
    )


def commands(quantize: Callable[..., Any], given: Mapping[str, Any]) -> tuple[str, ...]:
    """What made the file, and what judges it again. A part of `--data` that was set aside to judge on is not to be had again."""
    made = command(quantize, given)
    judged_on = _listed(given["held_out"])
    if given["no_verify"] or (_listed(given["data"]) and not judged_on):
        return (made,)
    words = ["fewbits", "verify", str(given["out"]), "--against", str(given["model"])]
    words += [word for text in judged_on for word in ("--data", str(text))]
    for name in ("max_kl", "min_agreement", "max_ppl_ratio", "length"):
        words += [] if given[name] is None else [f"--{name.replace('_', '-')}", f"{given[name]:g}"]
    words += ["--tokens", str(given["tokens"])] if given["tokens"] != signature(quantize).parameters["tokens"].default else []
    return made, shlex.join(words)


def _listed(paths: Any) -> list[Any]:
    return [paths] if isinstance(paths, str | Path) else list(paths)


def command(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """The command line that says the same as this call of a verb: what differs from the default, by the names that both share."""
    words = ["fewbits", function.__name__]
    for name, parameter in signature(function).parameters.items():
        value = given[name]
        if name in _SILENT or (parameter.default is not Parameter.empty and value in (parameter.default, [], ())):
            continue
        option = _SPELLED.get(name) or ("" if parameter.kind is not Parameter.KEYWORD_ONLY else f"--{name.replace('_', '-')}")
        if name == "formats" and not isinstance(value, str):
            value = ",".join(value)
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [option] if option else []
            words += [] if each is True else [f"{each:g}" if isinstance(each, float) else str(each)]
    return shlex.join(words)


def _versions(target: str) -> dict[str, str]:
    from fewbits import runtimes

    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in _PACKAGES:
        found[name] = metadata.version(name)
    judge = runtimes.get(targets.get(target).runtime)
    if judge.missing() is None:
        found[judge.name] = judge.version()
    return found
