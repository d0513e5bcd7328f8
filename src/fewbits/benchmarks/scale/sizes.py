"""`fewbits bench scale`: peak memory and time of a whole run against the size of the model.

Llamas of random weights grow by the number of their blocks, which stay the same: work that is bounded by a block is then flat in memory
and linear in time. Beside them, models of one size whose blocks grow. Each goes through calibrating, measuring, planning, quantizing,
exporting and verifying in a process of its own, by the call that `fewbits quantize` makes. Mixtures of experts can be added: a block of one
is as large as a small model.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fewbits import formats, methods
from fewbits.benchmarks.scale.process_usage import Usage, followed, watch
from fewbits.benchmarks.synthetic_llama import Shape, write_checkpoint
from fewbits.errors import InputError, MissingError
from fewbits.progress import Progress, silent
from fewbits.store.files import remove, to_json

SIZES = (0.1, 0.3, 1.0, 3.0)  # billion weights
WIDTHS = (1024, 3072)  # hidden sizes, beside the usual 2048
EXPERTS = 128
_WIDE = 0.3  # billion weights of the models whose width differs


@dataclass(frozen=True)
class Run:
    """The options of every run. The text is short: time grows with it in the same way at every size, and memory only up to `--memory`."""

    samples: int = 4
    length: int = 128
    tokens: int = 256
    size: str = "4.5bpw"
    formats: str = "q3_k,q5_k,q6_k"  # which llama.cpp maps from the file; of q4_k it makes a copy in another layout, so its memory grows
    method: str = "rtn"

    def options(self) -> dict[str, Any]:
        return asdict(self) | {"formats": self.formats.split(",")}


@dataclass(frozen=True)
class Point:
    shape: Shape
    weights: int
    block_bytes: int  # of one block in float32
    model_bytes: int
    file_bytes: int
    kl: float | None
    watched: Usage


@dataclass(frozen=True)
class Scaling:
    run: Run
    threads: int
    deeper: tuple[Point, ...]  # by the number of blocks
    wider: tuple[Point, ...]  # by the width of a block
    mixtures: tuple[Point, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def scale(
    out: Path,
    sizes: Sequence[float] = SIZES,
    widths: Sequence[int] = WIDTHS,
    run: Run | None = None,
    progress: Progress[Any] = silent,
    *,
    mixtures: Sequence[float] = (),
    experts: int = EXPERTS,
) -> Scaling:
    """One after the other in `out`, where scaling.json and scaling.svg stay, and the models do not."""
    import torch

    from fewbits.benchmarks.tables import scale as pictures

    run = run or Run()
    methods.get(run.method)
    for name in run.formats.split(","):
        formats.get(name)
    if wrong := [width for width in widths if width % 512]:
        raise InputError(f"`--widths {wrong[0]}` is no multiple of 512", "for example 1024,3072")
    if not Path("/proc/self/status").is_file():
        raise MissingError("this system does not say how much memory a process has", "run it on Linux, which has /proc")
    out.mkdir(parents=True, exist_ok=True)
    kinds = (
        [Shape.of(size) for size in sizes],
        [Shape.of(_WIDE, width) for width in widths],
        [Shape.mixture(size, experts) for size in mixtures],
    )
    every = [shape for kind in kinds for shape in kind]
    points = {shape: point(shape, run, out / "run") for shape in progress(every, len(every), "models")}
    result = Scaling(run, torch.get_num_threads(), *(tuple(points[shape] for shape in kind) for kind in kinds))
    (out / "scaling.json").write_text(to_json(result.to_dict()))
    (out / "scaling.svg").write_text(pictures.picture(result))
    return result


def point(shape: Shape, run: Run, folder: Path) -> Point:
    """Makes the model, runs it and removes it."""
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < 2 * shape.weights:
        hint = "give smaller `--sizes`, or another `-o`"
        raise MissingError(f"a model of {2 * shape.weights / 1e9:.1f} GB is larger than what is free, {free / 1e9:.1f} GB", hint)
    model, out = folder / "model", folder / "out"
    try:
        write_checkpoint(model, shape)
        remove(out)
        out.mkdir()
        watched, result = watch([sys.executable, "-m", __name__, str(model), str(out / "model.gguf"), json.dumps(run.options())], out)
        stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        return Point(shape, shape.weights, 4 * shape.block, stored, result["bytes"], result["kl"], watched)
    finally:
        remove(folder)


def _run(model: str, out: str, options: str) -> None:
    """In the child process."""
    from fewbits.pipeline import quantize

    result = quantize(model, out, offline=True, executor="local", progress=followed, **json.loads(options))  # one process is watched
    sys.stdout.write(json.dumps({"bytes": Path(out).stat().st_size, "kl": getattr(result.verdict, "kl_mean", None)}) + "\n")


if __name__ == "__main__":
    _run(*sys.argv[1:])
