"""Compiles kernels ahead of time, for GPUs that this machine need not have, in another process: Triton's interpreter and its compiler
cannot share one.

`python -m fewbits.kernels.triton.tooling.compiler` reads a JSON list of [case, architecture] and writes a line of JSON for each kernel as
it is compiled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import MissingError
from fewbits.kernels.triton import missing as triton_missing
from fewbits.kernels.triton import tile_shapes
from fewbits.kernels.triton.layout import TILE
from fewbits.kernels.triton.tooling import gpus

if TYPE_CHECKING:
    from fewbits.kernels.triton.call import Call
    from fewbits.kernels.triton.tooling.assembly import Inspection
    from fewbits.kernels.triton.tooling.cases import Case

LEAST_LOAD = 8  # bytes of packed weights that a lane must load at once
TENSOR = {
    "gfx1100": "v_wmma", "gfx90a": "v_mfma", "gfx942": "v_mfma", "sm_100": "tcgen05.mma", "sm_120": "mma.sync", "sm_80": "mma.sync",
    "sm_86": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma",
}  # fmt: skip
_OPERANDS = {"half": r"b?f16|kind::f16", "int8": r"\bs8\.s8\b|kind::i8|_iu?8|\di8$", "float8": r"e[45]m[23]\.e4m3|kind::f8f6f4"}


@dataclass(frozen=True)
class CompiledKernel:
    case: str
    architecture: str
    seconds: float
    registers: int
    spills: int  # bytes
    shared: int
    warps: int  # per program
    resident: int  # warps per multiprocessor
    tensor: tuple[str, ...]
    narrowest_load: int | None  # bytes per lane, of packed weights, keys and values
    bytes_per_weight: float | None
    problem: str | None  # why it is not good enough; None if it is
    instructions: float | None  # per weight, in the loop of a product of one token; NVIDIA only
    key: str  # the folder of Triton's cache that holds it


def compile_all(jobs: Sequence[tuple[str, str]], cache: Path | None = None) -> Iterator[CompiledKernel]:
    """In the order of the jobs, each as soon as it is compiled. cache: a folder for compiled kernels, instead of Triton's cache."""
    if not jobs:
        return
    if reason := triton_missing():
        raise MissingError(
            f"kernels cannot be compiled: {reason}", "the wheels of Triton bring its compiler and NVIDIA's assembler; no GPU is needed"
        )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)} if cache else {}
    worker = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert worker.stdin and worker.stdout
    with worker:
        worker.stdin.write(json.dumps(list(jobs)))
        worker.stdin.close()
        count = 0
        for line in worker.stdout:
            row = json.loads(line)
            yield CompiledKernel(**{**row, "tensor": tuple(row["tensor"])})
            count += 1
    if count < len(jobs):
        raise MissingError(
            f"the compiler stopped at `{' on '.join(jobs[count])}`, {count} of {len(jobs)} kernels done",
            "its last lines are above; is triton installed?",
        )


def compile_one(name: str, architecture: str) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.cache import get_cache_manager

    from fewbits.kernels.triton.device import Device
    from fewbits.kernels.triton.tooling import assembly, cases, occupancy

    case = cases.all()[name]
    call = case.call(Device(architecture, gpus.processors(architecture)))
    lanes = tile_shapes.lanes(architecture)
    target = GPUTarget("cuda", int(architecture[3:]), 32) if architecture.startswith("sm_") else GPUTarget("hip", architecture, lanes)
    start = time.perf_counter()
    compiled = triton.compile(call.source(target.backend), target=target, options=call.options)
    seconds = time.perf_counter() - start
    inspected = assembly.inspect(compiled)
    by_array = {name: [size for place in _places(call, name) for size in inspected.loads.get(place, ())] for name in case.packed}
    resident = occupancy.resident_warps(architecture, lanes, call.warps, inspected.registers, inspected.shared)
    problem = _problem(case, architecture, inspected, by_array, resident)
    loads = [size for sizes in by_array.values() for size in sizes]
    folder = Path(get_cache_manager(compiled.hash).cache_dir)
    return CompiledKernel(
        name, architecture, seconds, inspected.registers, inspected.spills, inspected.shared, call.warps, resident, inspected.tensor,
        min(loads, default=None), case.bytes_per_weight, problem, _per_weight(call, compiled, lanes), folder.name,
    )  # fmt: skip


def _per_weight(call: Call, compiled: Any, lanes: int) -> float | None:
    from fewbits.kernels.triton.tooling import assembly

    if call.kernel.__name__ not in ("vector", "vector_of_points") or "cubin" not in compiled.asm:
        return None
    count, constants = assembly.loop_instructions(compiled.asm["cubin"]), call.constants
    # an iteration has a tile of points, or WIDTH columns of each sub-tile
    columns = constants["WIDTH"] * (8 // (constants["HIGH"] or constants["LOW"])) if "WIDTH" in constants else TILE
    return None if count is None else count * lanes * call.warps / (constants["ROWS"] * columns)


def _problem(case: Case, architecture: str, inspected: Inspection, loads: Mapping[str, list[int]], resident: int) -> str | None:
    if inspected.spills:
        return f"{inspected.spills} bytes of registers are spilled"
    if resident == 0:
        return f"{inspected.shared} bytes of shared memory are more than {architecture} has"
    if inspected.flushes:
        return "subnormal numbers are flushed to zero"
    if case.tensor_cores == "any" and not inspected.tensor:
        return "no tensor-core instructions"
    if case.tensor_cores == "best" and not any(name.startswith(TENSOR[architecture]) for name in inspected.tensor):
        return f"no {TENSOR[architecture]} among {', '.join(inspected.tensor) or 'no tensor-core instructions'}"
    operands = "half" if case.operands == "float8" and not tile_shapes.multiplies_float8(architecture) else case.operands
    if case.tensor_cores != "none" and not all(re.search(_OPERANDS[operands], name) for name in inspected.tensor):
        return f"tensor cores multiply other types than {operands}: {', '.join(inspected.tensor)}"
    for name, sizes in loads.items():
        if not sizes:
            return f"no load of `{name}` was found"
        if min(sizes) < LEAST_LOAD:
            return f"a lane loads {min(sizes)} bytes of `{name}` at once"
    return None


def _places(call: Call, name: str) -> list[int]:
    """The numbers of an argument's pointers among the compiled kernel's arguments, where constants are left out and tuples unpacked."""
    from torch import Tensor

    place, places = 0, []
    for each in call.kernel.arg_names:
        if each in call.constants:
            continue
        value = call.arguments[each]
        for one in value if isinstance(value, tuple) else (value,):
            if one is None or (isinstance(one, int) and one == 1):
                continue
            if each == name and isinstance(one, Tensor):
                places.append(place)
            place += 1
    return places


def main() -> None:
    for name, architecture in json.load(sys.stdin):
        sys.stdout.write(json.dumps(asdict(compile_one(name, architecture))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
