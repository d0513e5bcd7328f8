"""How many warps of a kernel a multiprocessor holds at once: the least of what registers, shared memory and the hardware's own limits
allow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Processor:
    """A multiprocessor (NVIDIA) or compute unit (AMD), as the vendors' guides have it."""

    registers: int  # of 32 bits, for all lanes
    step: int  # registers are given to a warp in steps of so many per lane
    warps: int
    programs: int
    shared: int  # bytes
    reserved: int  # bytes of shared memory that each program costs beside its own
    largest: int  # bytes of shared memory that one program may have


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
    """Of a kernel whose programs have so many warps; 0 if not even one program fits."""
    own = PROCESSORS[architecture]
    if shared > own.largest:
        return 0
    per_warp = -(-max(registers, 1) // own.step) * own.step * lanes
    by_shared = own.shared // (shared + own.reserved) if shared + own.reserved else own.programs
    return warps * min(own.registers // (per_warp * warps), by_shared, own.warps // warps, own.programs)
