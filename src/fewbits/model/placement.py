"""Where a model's passes run: on the processor, or on a GPU beside it. Walk asks here; nothing else names a device.

A block goes to the device, its inputs come in batch by batch and its outputs go back: hidden states stay in the processor's memory. Sums
that are as wide as a weight stay on the device until the block is done, everything smaller comes back with each batch. So a device holds
one block, its sums and one batch, however large the model is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError, MissingError
from fewbits.progress import say, silent

if TYPE_CHECKING:
    import torch

    from fewbits.progress import Progress

AUTO, CPU = "auto", "cpu"
_GPUS = ("cuda", "xpu", "mps")  # in the order in which `auto` looks for them
_SHARE = 0.5  # of a device's free memory that sums may take; the rest is for batches

_current: ContextVar[str] = ContextVar("device of passes", default=CPU)


def check_name(name: str) -> str:
    """The device in one spelling; whether it is here is asked when it is used, as that loads torch."""
    lower = name.lower()
    if lower not in (AUTO, CPU) and not re.fullmatch(rf"({'|'.join(_GPUS)})(:\d+)?", lower):
        raise InputError(f"`{name}` is no device that passes run on", f"`--device` takes {AUTO}, {CPU}, cuda, cuda:1, mps or xpu")
    return lower


def for_executor(name: str, in_process: bool) -> str:
    """Workers run on the processor: their bytes may not depend on who has a GPU."""
    name = check_name(name)
    if in_process or name in (AUTO, CPU):
        return name if in_process else CPU
    raise InputError(f"`--device {name}` runs in this process, and `--executor` hands the work to others", "leave one of them out")


@contextmanager
def passes_on(name: str, progress: Progress[Any] = silent) -> Iterator[None]:
    """While inside, models run on this device."""
    chosen = find(name)
    if chosen != CPU:
        say(progress, f"the model runs on {described(chosen)}")
    token = _current.set(chosen)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> torch.device:
    import torch

    return torch.device(_current.get())


def part_of_key() -> dict[str, str]:
    """For the names of cached results: sums of another device differ in their last bits."""
    return {} if _current.get() == CPU else {"device": described(_current.get())}


def described(name: str) -> str:
    """`cuda:0 (NVIDIA GeForce RTX 3090)`, where the name of the device is known."""
    import torch

    device = torch.device(name)
    module = getattr(torch, device.type, None)
    model = module.get_device_name(device) if device.type in ("cuda", "xpu") and module is not None else ""
    return f"{name} ({model})" if model else name


def room_for_sums(device: torch.device) -> int | None:
    """Bytes that sums may take on the device; None: not known, as much as there is."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE)
    return int(torch.xpu.mem_get_info(device)[0] * _SHARE) if device.type == "xpu" else None


def find(name: str) -> str:
    """The device that this name means here, or an error: before the work, where it is called for that alone."""
    name = check_name(name)
    if name == CPU:
        return CPU
    import torch

    here = [gpu for gpu in _GPUS if _is_here(gpu)]
    if name == AUTO:
        return here[0] if here else CPU
    kind, _, number = name.partition(":")
    if kind not in here:
        build = f"torch {torch.__version__} finds none here"
        hint = "`--device cpu` runs anywhere; a GPU needs its driver and a build of torch for it" + (f"; here is {here[0]}" if here else "")
        raise MissingError(f"`--device {name}`: {build}", hint)
    if number and kind != "mps" and int(number) >= (count := getattr(torch, kind).device_count()):
        raise MissingError(f"`--device {name}`: there are {count}, numbered from 0", f"`--device {kind}:{count - 1}` is the last")
    return name


def _is_here(gpu: str) -> bool:
    import torch

    if gpu == "mps":
        return bool(torch.backends.mps.is_available())
    return bool(getattr(torch, gpu).is_available())
