"""`fewbits export`: an artifact in, the file of any target that accepts its formats out, checked against the plan."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, planning, targets
from fewbits.artifact import Artifact
from fewbits.artifact.located import located
from fewbits.artifact.written import record
from fewbits.devices.units import bytes_of
from fewbits.errors import InputError
from fewbits.progress import silent
from fewbits.store.files import Staged
from fewbits.targets import card
from fewbits.targets.running import how_to_run

if TYPE_CHECKING:
    from fewbits.progress import Progress
    from fewbits.targets import Target
    from fewbits.targets.running import HowToRun


def export(
    artifact: Artifact | str | Path,
    out: str | Path,
    *,
    to: str | None = None,
    split_size: str | int | None = None,
    progress: Progress[Any] = silent,
) -> Path:
    """Writes an artifact for any target that accepts its formats. `split_size`: bytes of tensors in each of several GGUF files."""
    split = split_bytes(split_size)
    if not isinstance(artifact, Artifact):
        artifact = Artifact(_beside(Path(artifact)))
    path = written(artifact, out, to=to, split=split, progress=progress)
    target = target_for(Path(out), to, split)
    command = ["fewbits", "export", str(artifact.path), "-o", str(out), *(["--to", to] if to else [])]
    card.write(artifact, path, target, shlex.join([*command, *(["--split-size", str(split)] if split else [])]))
    record(path)
    return path


def how_to_run_exported(artifact: str | Path, path: Path, to: str | None = None, split_size: str | int | None = None) -> HowToRun:
    """The next command for what `export` wrote."""
    return how_to_run(target_for(path, to, split_bytes(split_size)), path, Artifact(_beside(Path(artifact))).config)


def written(
    artifact: Artifact | str | Path, out: str | Path, *, to: str | None = None, split: int | None = None, progress: Progress[Any] = silent
) -> Path:
    """The same for a temporary file: its hash is not recorded."""
    target = target_for(Path(out), to, split)
    if not isinstance(artifact, Artifact):
        artifact = Artifact(_beside(Path(artifact)))
    path = output_path(Path(out), target)
    if artifact.layout not in (None, target.name):
        hint = f"quantize with `--to {target.name}`"
        raise InputError(f"the weights of `{artifact.path}` are laid out for {artifact.layout}, not for {target.name}", hint)
    if artifact.layout is None:
        check_target(target, artifact.path, artifact.config, artifact.tokenizer)
    planning.checked(artifact.plan, artifact.weights, target)
    for weight in artifact.weights:
        fmt = formats.get(artifact.plan[weight.name].format)
        if why_not := planning.refuses(weight, target, fmt):
            raise InputError(f"{target.name} cannot hold `{weight.name}` in {fmt.name}: {why_not}", f"quantize with `--to {target.name}`")
    artifact.check(progress)
    with Staged(path, target.marker) as staged:
        target.write(artifact, staged, progress)
        target.check(artifact.plan, artifact.weights, staged)
    return path


def _beside(path: Path) -> Path:
    """The artifact itself, or the one that lies beside a file."""
    if (found := located(path)) is None and path.is_file():
        again = (
            f"`fewbits quantize {path.name} -o OUT --requantize` makes one of it" if path.suffix.lower() == ".gguf" else "quantize again"
        )
        raise InputError(f"`{path}` is no artifact, and beside it there is none that it was written from", again)
    return found or path


def target_for(out: Path, to: str | None, split: int | None = None) -> Target:
    """The target asked for, or the one that the name of the file suggests. A name that contradicts the target is an error."""
    if split is not None:
        from fewbits.targets.gguf import Gguf

        if to not in (None, "gguf") or out.suffix:
            raise InputError("`--split-size` writes a folder of GGUF files", "give `-o` a folder's name and `--to gguf`, or leave it out")
        return Gguf(split)
    by_name = next((t for t in targets.all().values() if out.suffix.lower() == Path(t.file_name).suffix), None)
    target = targets.get(to) if to else by_name or targets.get("gguf")
    if by_name and by_name != target:
        raise InputError(f"`{out.name}` is named like a file of {by_name.name}, not of {target.name}", "choose another `-o` or `--to`")
    return target


def split_bytes(given: str | int | None) -> int | None:
    return None if given is None else bytes_of(given, "--split-size")


def output_path(out: Path, target: Target) -> Path:
    """A name with the target's suffix is the file itself; any other name is a folder, and the file in it has the target's usual name."""
    if not target.suffix:  # the output is a folder
        return out
    return out if out.suffix.lower() == Path(target.file_name).suffix else out / target.file_name


def check_target(target: Target, path: Path, config: Any, tokenizer: Any) -> None:
    if why_not := target.supports(config, tokenizer):
        raise InputError(f"{target.name} cannot hold `{path.name}`: {why_not}", f"all targets: {', '.join(targets.all())}")
