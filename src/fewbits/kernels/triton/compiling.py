"""Kernels compiled ahead of time, for GPUs that are not here, in processes of their own: Triton's interpreter and its compiler cannot
share one.

`python -m fewbits.kernels.triton.compiling` reads a JSON list of [case, architecture] and writes one JSON row for each as it is done.
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
from fewbits.kernels.triton import gpus, tiles
from fewbits.kernels.triton import missing as triton_missing

if TYPE_CHECKING:
    from fewbits.kernels.triton.calling import Call
    from fewbits.kernels.triton.cases import Case
    from fewbits.kernels.triton.inspecting import Seen

LEAST_LOAD = 8  # bytes of packed weights that a lane must load at once
TENSOR = {
    "gfx1100": "v_wmma", "gfx90a": "v_mfma", "gfx942": "v_mfma", "sm_100": "tcgen05.mma", "sm_120": "mma.sync", "sm_80": "mma.sync",
    "sm_86": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma",
}  # fmt: skip


_OPERANDS = {"half": r"b?f16|kind::f16", "int8": r"\bs8\.s8\b|kind::i8|_iu?8|\di8$", "float8": r"e[45]m[23]\.e4m3|kind::f8f6f4"}


@dataclass(frozen=True)
class Row:
    case: str
    architecture: str
    seconds: float
    registers: int
    spills: int  # bytes
    shared: int
    warps: int  # of a program
    resident: int  # warps on a multiprocessor
    tensor: tuple[str, ...]
    narrowest_load: int | None  # bytes per lane, of packed weights, keys and values
    bytes_per_weight: float | None
    problem: str | None  # why it is not good enough; None if it is
    instructions: float | None  # per weight, in the loop of a product of one token; of NVIDIA's alone
    key: str  # the folder of Triton's cache that holds it


def compile_all(jobs: Sequence[tuple[str, str]], cache: Path | None = None) -> Iterator[Row]:
    """Rows in the order of the jobs, each as soon as it is there. cache: a folder for what is compiled, instead of Triton's own."""
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
            yield Row(**{**row, "tensor": tuple(row["tensor"])})
            count += 1
    if count < len(jobs):
        raise MissingError(
            f"the compiler stopped at `{' on '.join(jobs[count])}`, {count} of {len(jobs)} kernels done",
            "its last lines are above; is triton installed?",
        )


def compile_one(name: str, architecture: str) -> Row:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.cache import get_cache_manager

    from fewbits.kernels.triton import cases, inspecting, occupancy
    from fewbits.kernels.triton.devices import Device

    case = cases.all()[name]
    call = case.call(Device(architecture, gpus.processors(architecture)))
    lanes = tiles.lanes(architecture)
    target = GPUTarget("cuda", int(architecture[3:]), 32) if architecture.startswith("sm_") else GPUTarget("hip", architecture, lanes)
    start = time.perf_counter()
    compiled = triton.compile(call.source(target.backend), target=target, options=call.options)
    seconds = time.perf_counter() - start
    seen = inspecting.inspect(compiled)
    by_array = {name: [size for place in _places(call, name) for size in seen.loads.get(place, ())] for name in case.packed}
    resident = occupancy.resident_warps(architecture, lanes, call.warps, seen.registers, seen.shared)
    problem = _problem(case, architecture, seen, by_array, resident)
    loads = [size for sizes in by_array.values() for size in sizes]
    folder = Path(get_cache_manager(compiled.hash).cache_dir)
    return Row(
        name, architecture, seconds, seen.registers, seen.spills, seen.shared, call.warps, resident, seen.tensor, min(loads, default=None),
        case.bytes_per_weight, problem, _per_weight(call, compiled, lanes), folder.name,
    )  # fmt: skip


def _per_weight(call: Call, compiled: Any, lanes: int) -> float | None:
    from fewbits.kernels.triton import inspecting

    if call.kernel.__name__ != "vector" or "cubin" not in compiled.asm:
        return None
    count, constants = inspecting.loop_instructions(compiled.asm["cubin"]), call.constants
    narrowest = constants["HIGH"] or constants["LOW"]
    weights = constants["ROWS"] * constants["WIDTH"] * (8 // narrowest) / (lanes * call.warps)  # of a lane, each time around
    return None if count is None else count / weights


def _problem(case: Case, architecture: str, seen: Seen, loads: Mapping[str, list[int]], resident: int) -> str | None:
    if seen.spills:
        return f"{seen.spills} bytes of registers are spilled"
    if resident == 0:
        return f"{seen.shared} bytes of shared memory are more than {architecture} has"
    if seen.flushes:
        return "subnormal numbers are flushed to zero"
    if case.tensor_cores == "any" and not seen.tensor:
        return "no tensor-core instructions"
    if case.tensor_cores == "best" and not any(name.startswith(TENSOR[architecture]) for name in seen.tensor):
        return f"no {TENSOR[architecture]} among {', '.join(seen.tensor) or 'no tensor-core instructions'}"
    operands = "half" if case.operands == "float8" and not tiles.multiplies_float8(architecture) else case.operands
    if case.tensor_cores != "none" and not all(re.search(_OPERANDS[operands], name) for name in seen.tensor):
        return f"tensor cores multiply other types than {operands}: {', '.join(seen.tensor)}"
    for name, sizes in loads.items():
        if not sizes:
            return f"no load of `{name}` was found"
        if min(sizes) < LEAST_LOAD:
            return f"a lane loads {min(sizes)} bytes of `{name}` at once"
    return None


def _places(call: Call, name: str) -> list[int]:
    """The numbers of an argument's pointers among those of the compiled kernel, which has no constants and no tuples."""
    from torch import Tensor

    place, found = 0, []
    for each in call.kernel.arg_names:
        if each in call.constants:
            continue
        value = call.arguments[each]
        for one in value if isinstance(value, tuple) else (value,):
            if one is None or (isinstance(one, int) and one == 1):
                continue
            if each == name and isinstance(one, Tensor):
                found.append(place)
            place += 1
    return found


def main() -> None:
    for name, architecture in json.load(sys.stdin):
        sys.stdout.write(json.dumps(asdict(compile_one(name, architecture))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
