"""Where a model runs, as people write it: one device, several (`2x3090`, `rtx 3090 + rtx 3060`), or some with system memory behind them
(`rtx 3060 + 32GB`), or a size alone (`8GB`).

Layers are divided among several devices by their memory, and a token passes through one after the other: the bandwidth of the group is
that of all bytes in the time of all parts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fewbits.devices import catalogue
from fewbits.devices.catalogue import Device
from fewbits.devices.units import parse_memory
from fewbits.errors import InputError

_SYSTEM = 3 << 30  # bytes that the operating system, a desktop and a browser take, as in the catalogue
_TWO_CHANNELS = {"ddr4": 51.2, "ddr5": 89.6}  # GB/s of DDR4-3200 and DDR5-5600
_TIMES = re.compile(
    r"(?:(?P<before>\d{1,2}) *[x\u00d7*] *(?=[a-z0-9])(?P<first>.+)|(?P<second>.+?) +[x\u00d7*] *(?P<after>\d{1,2}))", re.IGNORECASE
)
_RAM = re.compile(r"(?P<size>[0-9.]+ *[kmgt]?i?b?) *(?:of +)?(?P<kind>ddr[45](?:-\d+)?)? *(?:(?:system *)?(?:ram|memory))?", re.IGNORECASE)
_MOST = 64  # of one kind


def place(text: str, option: str = "--fits") -> Device:
    """One device for all that the text names. `Device.parts` has them if there are several, `Device.behind` the system memory."""
    items = [item.strip() for item in re.split(r"[,+;&]|\band\b", text) if item.strip()]
    if len(items) == 1 and not _TIMES.fullmatch(items[0]):
        return _one(items[0], option)
    named: list[Device] = []
    sizes: list[Device] = []
    for item in items:
        count, what = _counted(item)
        device = _one(what, option)
        if device.kind in (catalogue.BYTES, "pc") and (ram := _system_memory(what, device)):
            sizes += [ram] * count
        else:
            named += [device] * count
    if not items:
        raise InputError(f"`{option} {text}` names no device", "for example `rtx 4090`, `2x3090`, or `rtx 3060 + 32GB`")
    if not named:  # sizes alone: memories side by side
        return _group([_one(_counted(item)[1], option) for item in items for _ in range(_counted(item)[0])])
    if len(sizes) > 1:
        raise InputError(f"`{option} {text}` names {len(sizes)} system memories", "a machine has one: add the sizes up")
    together = _group(named)
    return replace(together, behind=sizes[0]) if sizes else together


def with_memory(device: Device, text: str, option: str = "--ram") -> Device:
    """The device with so much system memory behind it, for the layers that do not fit."""
    if not device.is_gpu or device.behind:
        why = "has system memory already" if device.behind else "runs in system memory itself"
        raise InputError(f"`{option} {text}`: `{device.name}` {why}", f"leave `{option}` out")
    ram = _system_memory(text, catalogue.memory(_size_in(text), option))
    assert ram is not None, "a size is always one"
    return replace(device, behind=ram)


def _size_in(text: str) -> str:
    match = _RAM.fullmatch(text.strip())
    return match["size"] if match else text


def _counted(item: str) -> tuple[int, str]:
    match = _TIMES.fullmatch(item)
    if match is None:
        return 1, item
    count = int(match["before"] or match["after"])
    if not 1 <= count <= _MOST:
        raise InputError(f"`{item}` is {count} devices", f"from 1 to {_MOST} are counted")
    return count, match["first"] or match["second"]


def _one(text: str, option: str) -> Device:
    """A device by its name, or one of which only the memory is known: `8GB`."""
    bare = text.strip()
    size = _RAM.fullmatch(bare)
    four_digits = len(bare) == 4 and bare.isdigit()  # `4090` is a card, not bytes
    known = bool(catalogue.named(bare)) and (four_digits or bool(size and size["kind"]))
    return catalogue.memory(size["size"].strip(), option) if size and not known else catalogue.find(bare)


def _system_memory(text: str, device: Device) -> Device | None:
    if device.kind == "pc":
        return device
    match = _RAM.fullmatch(text.strip())
    if match is None:
        return None
    nbytes = parse_memory(match["size"])
    kind = (match["kind"] or "ddr4")[:4].lower()
    said = "" if match["kind"] else "; taken for two channels of DDR4-3200"
    usable = nbytes - _SYSTEM if nbytes > 2 * _SYSTEM else nbytes
    return Device(
        f"{match['size'].strip()} of system memory", "pc", nbytes, usable, _TWO_CHANNELS[kind], source=f"{_TWO_CHANNELS[kind]:g} GB/s{said}"
    )


def _group(devices: Sequence[Device]) -> Device:
    if len(devices) == 1:
        return devices[0]
    counts = Counter(device.name for device in devices)
    kinds = {device.kind for device in devices}
    return Device(
        name=" + ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items()),
        kind=kinds.pop() if len(kinds) == 1 else "gpu",
        memory=sum(device.memory for device in devices),
        usable=sum(device.usable for device in devices),
        bandwidth=_in_turn(devices, [device.bandwidth for device in devices]),
        half=_in_turn(devices, [device.half for device in devices]),
        int8=_in_turn(devices, [device.int8 for device in devices]),
        fast=tuple(name for name in devices[0].fast if all(name in device.fast for device in devices)),
        source="; ".join(sorted({device.source for device in devices})),
        parts=tuple(devices),
    )


def _in_turn(devices: Sequence[Device], rates: Sequence[float | None]) -> float | None:
    """The rate at which all bytes are read, each part's at its own, one part after the other."""
    known = [rate for rate in rates if rate]
    if len(known) < len(devices):
        return None
    total = sum(device.usable for device in devices)
    return round(1 / sum(device.usable / total / rate for device, rate in zip(devices, known, strict=True)), 1)
