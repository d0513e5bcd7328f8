"""What compiled code shows: registers, spills, shared memory, tensor-core instructions, and how many bytes of an array a lane loads at
once.

NVIDIA's PTX and AMD's LLVM code are read as text. The loads of an array are found by following its pointer: all addresses computed from a
kernel's argument belong to that argument.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TENSOR = re.compile(r"\b(mma\.sync\.aligned[\w.]+|wgmma\.mma_async[\w.]*|tcgen05\.mma[\w.:]*|v_s?wmma_\w+|v_mfma_\w+)")
_SIZES = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8}


@dataclass(frozen=True)
class Inspection:
    registers: int  # per lane
    spills: int  # bytes of stack per lane
    shared: int  # bytes per program
    tensor: tuple[str, ...]  # tensor-core instructions, each once
    flushes: bool  # whether subnormals are flushed to zero, which breaks the decoding of e2m1 and 2^-127
    loads: Mapping[int, tuple[int, ...]]  # by the pointer's number among the kernel's arguments: bytes per lane of each load from it


def inspect(compiled: Any) -> Inspection:
    """compiled: what triton.compile returns."""
    asm, shared = compiled.asm, int(compiled.metadata.shared)
    if "ptx" in asm:
        registers, stack = _resources(asm["cubin"])
        flushes = re.search(r"\b(?:mul|fma|add|sub)\.(?:rn\.)?ftz", asm["ptx"]) is not None
        return Inspection(registers, stack, shared, _instructions(asm["ptx"]), flushes, _loads(_ptx(asm["ptx"])))
    text = asm["amdgcn"]
    registers, spilled = (int(_first(rf"\.{name}:\s+(\d+)", text)) for name in ("vgpr_count", "private_segment_fixed_size"))
    flushes = _first(r"amdhsa_float_denorm_mode_32 (\d)", text) != "3"
    return Inspection(registers, spilled, shared, _instructions(text), flushes, _loads(_llvm(asm["llir"])))


def loop_instructions(cubin: bytes) -> int | None:
    """Instructions in the longest loop, by NVIDIA's disassembler; None without a loop. A multiprocessor issues four of them per clock."""
    output = _tool("nvdisasm", ["-c"], cubin)
    labels: dict[str, int] = {}
    count, longest = 0, 0
    for line in output.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            count += 1
            jump = re.search(r"BRA.*?(\.L_x_\d+)", code[1])
            if jump and jump[1] in labels:
                longest = max(longest, count - labels[jump[1]])
    return longest or None


def _instructions(text: str) -> tuple[str, ...]:
    return tuple(sorted(set(_TENSOR.findall(text))))


def _resources(cubin: bytes) -> tuple[int, int]:
    output = _tool("cuobjdump", ["-res-usage"], cubin)
    return int(_first(r"REG:(\d+)", output)), int(_first(r"STACK:(\d+)", output))


def _tool(name: str, words: list[str], cubin: bytes) -> str:
    """Runs one of the tools that come with Triton."""
    import triton.backends.nvidia as nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as stored:
        stored.write(cubin)
        stored.flush()
        tool = Path(str(nvidia.__file__)).parent / "bin" / name
        return subprocess.run([tool, *words, stored.name], capture_output=True, text=True, check=True).stdout


def _first(pattern: str, text: str) -> str:
    if (match := re.search(pattern, text)) is None:
        raise RuntimeError(f"the compiler's output has no `{pattern}`")
    return match[1]


@dataclass(frozen=True)
class _Step:
    """One instruction: a computation of `result` from `sources`, an argument, or a load."""

    result: str = ""
    sources: tuple[str, ...] = ()
    argument: int | None = None
    bytes: int = 0  # of a load, whose address is the first source


def _loads(steps: Iterable[_Step]) -> dict[int, tuple[int, ...]]:
    steps = list(steps)
    of: dict[str, set[int]] = {step.result: {step.argument} for step in steps if step.argument is not None}
    changed = True
    while changed:  # again until nothing changes: a loop computes pointers after their first use
        changed = False
        for step in steps:
            if step.result and not step.bytes and step.argument is None:
                new = set().union(*(of.get(source, set()) for source in step.sources)) - of.get(step.result, set())
                if new:
                    of.setdefault(step.result, set()).update(new)
                    changed = True
    loads: dict[int, list[int]] = {}
    for step in steps:
        if step.bytes:
            for argument in of.get(step.sources[0], ()):
                loads.setdefault(argument, []).append(step.bytes)
    return {argument: tuple(sorted(sizes)) for argument, sizes in sorted(loads.items())}


def _ptx(text: str) -> Iterable[_Step]:
    for line in text.splitlines():
        line = line.split("//")[0].strip().rstrip(";")
        line = re.sub(r"^@!?%p\d+\s+", "", line)
        if match := re.match(r"ld\.param\.\w+\s+(%rd\d+), \[\w+_param_(\d+)\]", line):
            yield _Step(match[1], argument=int(match[2]))
        elif match := re.match(r"cp\.async\.c[ag]\.shared\.global\S*\s+\[[^]]*\],\s*\[\s*(%rd\d+)[^]]*\],\s*(\w+)", line):
            yield _Step(sources=(match[1],), bytes=int(match[2], 0))
        elif match := re.match(r"ld\.global\S*?(?:\.v(\d))?\.[bus](\d+)\s.*\[\s*(%rd\d+)", line):
            yield _Step(sources=(match[3],), bytes=int(match[1] or 1) * int(match[2]) // 8)
        elif match := re.match(r"[a-z]\S*\s+(%rd\d+),(.*)", line):
            yield _Step(match[1], tuple(re.findall(r"%rd\d+", match[2])))


def _llvm(text: str) -> Iterable[_Step]:
    head = re.search(r"define amdgpu_kernel void @\w+\((.*?)\)[^)]*\{", text, re.DOTALL)
    if head is None:
        raise RuntimeError("the compiler's output has no kernel")
    for place, name in enumerate(re.findall(r"(%[\w.]+)(?=,|$)", head[1])):
        yield _Step(name, argument=place)
    for line in text[head.end() :].splitlines():
        match = re.match(r"\s+(%[\w.]+) = (.*)", line)
        if not match:
            continue
        result, rest = match.groups()
        if (load := re.match(r"(?:tail )?load (<[^>]+>|\w+), ptr addrspace\(1\) (%[\w.]+)", rest)) or (
            load := re.search(r"call (<[^>]+>|\w+) @llvm\.amdgcn\.raw\.ptr\.buffer\.load\S*\(ptr addrspace\(8\) (?:\w+ )*(%[\w.]+)", rest)
        ):
            yield _Step(sources=(load[2],), bytes=_bytes(load[1]))
        elif not re.match(r"(?:tail )?load ", rest) and not re.search(r"call .*@llvm\.amdgcn\.(?!make\.buffer)", rest):
            yield _Step(result, tuple(re.findall(r"%[\w.]+", rest)))


def _bytes(kind: str) -> int:
    count, single = (int(match[1]), match[2]) if (match := re.match(r"<(\d+) x (\w+)>", kind)) else (1, kind)
    return count * (_SIZES[single] if single in _SIZES else int(single[1:]) // 8)
