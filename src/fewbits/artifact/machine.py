"""What the last bits of a floating-point sum depend on: the processor, its instructions, the number of threads, the versions.

Codes that are chosen without calibration are the same everywhere: every group is fitted by itself, and all kernels give the same bits.
What torch sums (statistics, factors of Hessians, rewrites, tuning) is added up in an order that depends on the machine, and so may codes
that are fitted to it. Therefore the provenance of a calibrated artifact names the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from fewbits.devices import processor
from fewbits.store import maker

SAME_ANYWHERE = "Nothing was calibrated: any processor and any number of threads gives the same bytes."
SAME_HERE = (
    "Codes were fitted to floating-point sums, which another instruction set, number of threads or version of torch adds up in another "
    "order, and so does a GPU: the bytes come again where the machine is this one, and may differ in some codes elsewhere."
)


@dataclass(frozen=True)
class Machine:
    processor: str  # torch's BLAS chooses its code by it
    instructions: str  # that torch uses, in its words: AVX512, AVX2, DEFAULT
    threads: int
    kernels: str  # fewbits' own: native-avx512, reference
    torch: str
    fewbits: str


def here() -> Machine:
    import torch

    instructions, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return Machine(maker.processor_name(), instructions, threads, processor.backend(), torch.__version__, metadata.version("fewbits"))


def caveat(calibrated: bool) -> str:
    """Who gets the same bytes, in a sentence."""
    return SAME_HERE if calibrated else SAME_ANYWHERE
