"""How many warps of a kernel a multiprocessor holds at once: limited by registers, shared memory and the hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Processor:
    """A multiprocessor (NVIDIA) or compute unit (AMD), with figures from the vendors' guides."""

    registers: int  # of 32 bits, for all lanes together
    step: int  # registers per lane are allocated in multiples of this
    warps: int
    programs: int
    shared: int  # bytes
    reserved: int  # bytes of shared memory that each program takes beside what it asks for
    largest: int  # bytes of shared memory that one program may ask for


_K = 1024
PROCESSORS = {
    "gfx1100": Processor(98304, 24, 32, 32, 64 * _K, 0, 64 * _K),
    "gfx90a": Processor(131072, 8, 32, 32, 64 * _K, 0, 64 * _K),
    "gfx942": Processor(131072, 8, 32, 32, 64 * _K, 0, 64 * _K),
    "sm_100": Processor(65536, 8, 64, 32, 228 * _K, _K, 227 * _K),
    "sm_120": Processor(65536, 8, 48, 24, 100 * _K, _K, 99 * _K),
    "sm_80": Processor(65536, 8, 64, 32, 164 * _K, _K, 163 * _K),
    "sm_86": Processor(65536, 8, 48, 16, 100 * _K, _K, 99 * _K),
    "sm_89": Processor(65536, 8, 48, 24, 100 * _K, _K, 99 * _K),
    "sm_90": Processor(65536, 8, 64, 32, 228 * _K, _K, 227 * _K),
}


def resident_warps(architecture: str, lanes: int, warps: int, registers: int, shared: int) -> int:
    """For a kernel with this many warps per program; 0 if not even one program fits."""
    processor = PROCESSORS[architecture]
    if shared > processor.largest:
        return 0
    per_warp = -(-max(registers, 1) // processor.step) * processor.step * lanes
    by_shared = processor.shared // (shared + processor.reserved) if shared + processor.reserved else processor.programs
    return warps * min(processor.registers // (per_warp * warps), by_shared, processor.warps // warps, processor.programs)
