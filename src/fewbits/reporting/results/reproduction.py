"""The commands, hashes and versions needed to make the same file again and to check that it is the same."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import artifact as artifacts
from fewbits import targets
from fewbits.artifact import machine as machines
from fewbits.calibration import listed
from fewbits.calibration.text import domains
from fewbits.reporting.schema import CALIBRATED, Hash, Reproduction
from fewbits.store.files import sha256_of

if TYPE_CHECKING:
    from fewbits.artifact import Artifact

_PACKAGES = ("fewbits", "torch", "transformers", "numpy", "gguf", "safetensors")
_SPELLED = {"model": "", "out": "-o"}  # a field of the request -> the option, if that is named otherwise
# options that change nothing in the result; of `--within` it is what it left, and that is named
_SILENT = {"answers", "began", "executor", "fresh", "memory", "offline", "store", "within"}


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
        tuple(commands), tuple(hashes), _versions(artifact.plan.target), asdict(machines.here()), machines.caveat(bool(origin.calibration))
    )


def commands(request: Any) -> tuple[str, ...]:
    """What made the file, and what judges it again. There is no second command if a part of `--data` was set aside to judge on: `verify`
    cannot draw the same part."""
    made = command("quantize", request)
    judged_on = listed(request.held_out)
    if request.no_verify or (listed(request.data) and not judged_on):
        return (made,)
    words = ["fewbits", "verify", str(request.out), "--against", str(request.model)]
    words += [word for text in judged_on for word in ("--data", str(text))]
    mix = request.mix.of(domains.names(judged_on))
    limits = {name: getattr(request, name) for name in ("max_kl", "min_agreement", "max_ppl_ratio")}
    length = ",".join(_spelled(each) for each in (request.usual_length, mix.lengths) if each)
    for name, value in {**limits, "length": length or None, "weights": mix.weights or None}.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", _spelled(value)]
    default = next(each.default for each in fields(request) if each.name == "tokens")
    words += ["--tokens", str(request.tokens)] if request.tokens != default else []
    return made, shlex.join(words)


def for_size(request: Any) -> str:
    """The same request for another size, to be written in the place of the word `SIZE`. How long to tune depends on the size, and is left
    to it."""
    return command("quantize", request, {"size": "SIZE", "fits": None, "context": None, "format": None, "plan": None, "tune": None})


def command(verb: str, request: Any, instead: Mapping[str, Any] | None = None) -> str:
    """The command line of this request: the options that differ from their default. `instead`: other values for some."""
    words = ["fewbits", verb]
    for option in fields(request):
        value = (instead or {}).get(option.name, getattr(request, option.name))
        if option.name in _SILENT or (option.default is not MISSING and value in (option.default, [], ())):
            continue
        spelled = _SPELLED.get(option.name, f"--{option.name.replace('_', '-')}")
        if option.name == "formats" and not isinstance(value, str):
            value = ",".join(value)
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [spelled] if spelled else []
            words += [] if each is True else [_spelled(each)]
    return shlex.join(words)


def _spelled(value: Any) -> str:
    """As the command line takes it."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_spelled(each)}" for name, each in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _versions(target: str) -> dict[str, str]:
    from fewbits.verification import runtimes

    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in _PACKAGES:
        versions[name] = metadata.version(name)
    judge = runtimes.get(targets.get(target).runtime)
    if judge.missing() is None:
        versions[judge.name] = judge.version()
    return versions
