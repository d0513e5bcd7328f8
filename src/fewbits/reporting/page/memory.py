"""What running it takes in memory, and which devices have that much."""

from __future__ import annotations

from fewbits.devices import catalogue
from fewbits.reporting.page.markup import Html, Section, behind, figure, legend, missing, table
from fewbits.reporting.page.words import size
from fewbits.reporting.schema import MemoryUse, Results

_TITLE = "Memory"
_PARTS = ("weights", "KV cache", "activations", "runtime")
_BETWEEN = 10  # devices shown of those that hold it at some contexts and not at others
_TIGHT = 0.9  # of a device's memory: beyond it, other programs decide whether it runs


def section(made: Results) -> Section | None:
    if not made.memory:
        why = made.left_out.get("memory")
        return missing("memory", _TITLE, f"What it takes to run was not counted: {why}.") if why else None
    uses = made.memory
    rows = [(_name(use), *(size(nbytes) for nbytes in _bytes(use)), size(use.total)) for use in uses]
    columns = ("context, KV cache", *_PARTS, "total")
    label = f"It takes from {size(min(u.total for u in uses))} to {size(max(u.total for u in uses))} to run, by context and KV cache"
    parts = [{"use": _name(use), "part": part, "bytes": nbytes} for use in uses for part, nbytes in zip(_PARTS, _bytes(use), strict=True)]
    keys = [(f"part-{number}", part) for number, part in enumerate(_PARTS, 1)]
    return Section(
        "memory",
        _TITLE,
        "What running it takes, counted from its shape. The cache holds the keys and values of the context and grows with it.",
        (
            figure("memory", label, "Bytes by what they are for, one sequence at a time.", legend(keys)),
            behind("These figures as a table", table(columns, rows, "Memory by context and KV cache", (1, 2, 3, 4, 5))),
            _devices(uses),
        ),
        {"memory": parts},
    )


def _devices(uses: tuple[MemoryUse, ...]) -> Html:
    """From the largest device that is too small for every use to the two smallest that hold all of them; one for each size of memory."""
    names = {device.usable: device.name for device in reversed(catalogue.all())}
    known = [(names[nbytes], nbytes) for nbytes in sorted(names)]
    least, most = min(use.total for use in uses), max(use.total for use in uses)
    small = [row for row in known if row[1] < least][-1:]
    some = [row for row in known if least <= row[1] and row[1] * _TIGHT < most]
    some = some[:: -(-len(some) // _BETWEEN)] if some else some
    large = [row for row in known if row[1] * _TIGHT >= most][:2]
    columns = ("device", *(_name(use) for use in uses))
    rows = [(name, *(_fits(use, nbytes) for use in uses)) for name, nbytes in (*small, *some, *large)]
    return table(columns, rows, "Does it fit?", tuple(range(1, len(columns))))


def _fits(use: MemoryUse, nbytes: int) -> str:
    if use.total > nbytes:
        return f"no, {size(use.total - nbytes)} short"
    word = "fits" if use.total <= _TIGHT * nbytes else "tight"
    return f"{word}, {size(nbytes - use.total)} free"


def _bytes(use: MemoryUse) -> tuple[int, ...]:
    return use.weights, use.kv_cache, use.activations, use.overhead


def _name(use: MemoryUse) -> str:
    return f"{use.context:,} tokens, {use.kv}"
