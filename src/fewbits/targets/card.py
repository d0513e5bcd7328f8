"""The model card beside every file and folder that is written: what it is, what was measured, the plan, how to run it, how it was made.

In a folder it is README.md, where the hub looks for it. Beside a single file it is FILE.README.md: several files may lie in one folder, and
a README.md that is there is somebody else's. `fewbits publish` sends it as README.md.

The artifact folder has a card too. What the source's own card says (license, language) and the command that made it are read from there
when the artifact is exported again.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import targets
from fewbits.model.checkpoints import cards
from fewbits.store.files import Staged
from fewbits.targets.running import gives_embeddings, how_to_run

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.model.checkpoints.cards import Origin
    from fewbits.targets import Target
    from fewbits.targets.running import Command

NAME = cards.NAME
MAKER = "fewbits"


def place(path: Path) -> Path:
    """Where the card of an output is."""
    return path / NAME if path.is_dir() else path.with_name(f"{path.name}.{NAME}")


def write(
    artifact: Artifact, path: Path, target: Target, command: str, origin: Origin | None = None, verdict: Mapping[str, Any] | None = None
) -> Path:
    """`command`: what made it. Without an `origin`, what the artifact's own card says. `verdict`: as `to_dict` gives it; without one,
    those that the artifact has."""
    before = artifact.path / NAME
    known = [verdict] if verdict else list(artifact.verdicts.values())
    earlier = cards.command_in(before) if origin is None else ""
    commands = [without_paths(each) for each in (earlier, command) if each]
    return save(path, text(artifact, path, target, commands, origin or cards.read(before), known))


def save(path: Path, card: Sequence[str]) -> Path:
    """The parts of a card, in its place."""
    with Staged(place(path)) as staged:
        staged.write_text("\n\n".join(card) + "\n", encoding="utf-8")
    return place(path)


def write_all(artifact: Artifact, path: Path, target: Target, command: str, origin: Origin, verdict: Mapping[str, Any] | None) -> Path:
    """Of the artifact and of the file that was made of it, whose card's place is returned."""
    write(artifact, artifact.path, targets.get(MAKER), command, origin, verdict)
    return write(artifact, path, target, command, origin, verdict)


def text(
    artifact: Artifact, path: Path, target: Target, commands: Sequence[str], origin: Origin, verdicts: Sequence[Mapping[str, Any]]
) -> list[str]:
    source = artifact.provenance.source
    bits = artifact.plan.bits_per_weight
    base = f"[{origin.base_model}](https://huggingface.co/{origin.base_model})" if origin.base_model else f"`{source}`"
    about = f"{base}, quantized to {bits:.2f} bits per weight with fewbits {artifact.provenance.fewbits}: {target.about}."
    return [
        _front_matter(artifact, target, origin, commands),
        f"# {source.rpartition('/')[2]}, {bits:.2f} bits per weight",
        about,
        *_measured(verdicts, target),
        *_plan(artifact),
        *_running(artifact, path, target),
        *_made(artifact, commands),
    ]


def _front_matter(artifact: Artifact, target: Target, origin: Origin, commands: Sequence[str]) -> str:
    usual = "feature-extraction" if gives_embeddings(artifact.config) else "text-generation"
    values: dict[str, Any] = {
        "base_model": origin.base_model,
        "base_model_relation": "quantized" if origin.base_model else None,
        "quantized_by": MAKER,
        "pipeline_tag": origin.pipeline_tag or usual,
        "library_name": target.library,
        "license": origin.license,
        "license_name": origin.license_name,
        "license_link": origin.license_link,
        "language": list(origin.language) or None,
        "tags": list(dict.fromkeys([MAKER, "quantized", target.name])),
        "fewbits_command": commands[0] if commands else None,
    }
    return front_matter(values)


def front_matter(values: Mapping[str, Any]) -> str:
    """JSON is YAML: whatever a value has in it, it stays one value."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None]
    return "\n".join(["---", *lines, "---"])


def _measured(verdicts: Sequence[Mapping[str, Any]], target: Target) -> list[str]:
    known = [(verdict["runtime"], rows) for verdict in verdicts if (rows := _readable(verdict))]
    if not known:
        return ["## Measured", "The file was not run: nothing is known of how close it is to its source."]
    rows = [row for _, figures in known for row in figures]
    others = any(runtime != target.runtime for runtime, _ in known)
    said = "Beside the float model, on text that it was not fitted to."
    said += " The figures are of the file that this one was exported from, in its own runtime." if others else ""
    return ["## Measured", said, table(("", "value"), rows)]


def _readable(verdict: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Its figures; none of a verdict that an artifact of another version, or of anybody, has in another form."""
    try:
        return list(_figures(verdict))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return []


def _figures(verdict: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield "runtime", f"{verdict['runtime']} ({verdict['runtime_version']})"
    yield "size", f"{verdict['bytes']:,} bytes, {verdict['bits_per_weight']:.3f} bits per weight"
    yield "tokens", f"{verdict['tokens']:,}"
    if verdict.get("reference"):
        yield "compared with", str(verdict["reference"])
    if "cosine_mean" in verdict:
        yield "cosine to float", _interval(verdict["cosine_mean"], verdict["cosine_ci95"])
        return
    yield "KL divergence", _interval(verdict["kl_mean"], verdict["kl_ci95"])
    if verdict.get("kl_floor") is not None:
        yield "of it the runtime's own", f"{verdict['kl_floor']:.1e}"
    yield "same top token", f"{100 * verdict['top1_agreement']:.2f} %"
    yield "perplexity", f"{_number(verdict['ppl'])}, float {_number(verdict['ppl_base'])}"
    yield "perplexity ratio", _interval(verdict["ppl_ratio"], verdict["ppl_ratio_ci95"])
    for each in verdict.get("domains") or ():
        yield f"KL on {each['name']}", _interval(each["kl_mean"], each["kl_ci95"])


def _interval(value: float | None, interval: Sequence[float | None]) -> str:
    return "{} (95 %: {} to {})".format(*map(_number, (value, *interval)))


def _number(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.5f}"


def _plan(artifact: Artifact) -> list[str]:
    """Bits by kind of weight, and which formats."""
    numbers, stored, weights = Counter[str](), Counter[str](), Counter[str]()
    formats: dict[str, Counter[str]] = {}
    for weight in artifact.weights:
        entry, kind = artifact.plan[weight.name], weight.kind
        numbers[kind] += entry.shape[0] * entry.shape[1]
        stored[kind] += entry.nbytes
        weights[kind] += 1
        formats.setdefault(kind, Counter())[entry.format] += 1
    rows = [
        (kind, str(weights[kind]), f"{8 * stored[kind] / numbers[kind]:.2f}", ", ".join(f"{n} {name}" for name, n in used.most_common()))
        for kind, used in formats.items()
    ]
    return ["## The plan", table(("kind of weight", "weights", "bits per weight", "formats"), rows)]


def _running(artifact: Artifact, path: Path, target: Target) -> list[str]:
    return how_it_is_run(how_to_run(target, path, artifact.config, Path(path.name)).commands)


def how_it_is_run(commands: Iterable[Command]) -> list[str]:
    blocks = [f"{command.what[:1].upper()}{command.what[1:]}:\n\n```{command.language}\n{command.text}\n```" for command in commands]
    return ["## How to run it", *blocks]


def _made(artifact: Artifact, commands: Sequence[str]) -> list[str]:
    origin = artifact.provenance
    rows = [("source", f"`{origin.source}`"), ("sha256 of the source", f"`{origin.sha256}`")]
    rows += [("sha256 of the calibration text", f"`{origin.calibration}`")] if origin.calibration else []
    parts = ["## How it was made"]
    if commands:
        parts.append("```sh\n" + "\n".join(commands) + "\n```")
    return [*parts, table(("", ""), rows)]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in line)} |" for line in lines)


def without_paths(command: str) -> str:
    """A published card names files, and not where they were on somebody's disk."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    return shlex.join(_without_path(word) for word in words)


def _without_path(word: str) -> str:
    kind, equals, path = word.rpartition("=")
    return f"{kind}{equals}{Path(path).name}" if path.startswith(("/", "~/", "../")) else word
