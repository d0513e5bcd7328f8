"""What running it takes in memory, and which devices have that much."""

from __future__ import annotations

from fewbits.reporting.page.contents import Results, Use
from fewbits.reporting.page.markup import Html, behind, figure, legend, table
from fewbits.reporting.page.sections import Section, missing
from fewbits.reporting.page.words import size

_TITLE = "Memory"
_BETWEEN = 10  # devices on which the context decides: so many of them are shown
_TIGHT = 0.9  # of a device's memory: beyond it, other programs decide whether it runs


def devices() -> tuple[tuple[str, int], ...]:
    """Names and usable bytes, smallest first; of several with equal memory the first in the catalogue."""
    from fewbits.capacity import devices as catalogue

    found: dict[int, str] = {}
    for device in catalogue.all():
        found.setdefault(device.usable, device.name)
    return tuple((name, nbytes) for nbytes, name in sorted(found.items()))


def section(found: Results) -> Section | None:
    made = found.made
    if made is None:
        return None
    if not made.memory:
        why = made.left_out.get("memory")
        return missing("memory", _TITLE, f"What it takes to run was not counted: {why}.") if why else None
    uses = made.memory
    rows = [(_name(use), *(size(part) for part in (use.weights, use.kv_cache, use.activations, use.overhead, use.total))) for use in uses]
    columns = ("context, KV cache", "weights", "KV cache", "activations", "runtime", "total")
    label = f"It takes from {size(min(u.total for u in uses))} to {size(max(u.total for u in uses))} to run, by context and KV cache"
    parts = [
        {"use": _name(use), "part": part, "bytes": nbytes}
        for use in uses
        for part, nbytes in (
            ("weights", use.weights), ("KV cache", use.kv_cache), ("activations", use.activations), ("runtime", use.overhead),
        )
    ]  # fmt: skip
    keys = [(f"part-{number}", part) for number, part in enumerate(("weights", "KV cache", "activations", "runtime"), 1)]
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


def _devices(uses: tuple[Use, ...]) -> Html:
    """From the largest that holds nothing of it to the smallest that holds all: what lies beyond is known."""
    known = devices()
    least, most = min(use.total for use in uses), max(use.total for use in uses)
    small = [row for row in known if row[1] < least][-1:]
    some = [row for row in known if least <= row[1] and row[1] * _TIGHT < most]
    some = some[:: -(-len(some) // _BETWEEN)] if some else some
    large = [row for row in known if row[1] * _TIGHT >= most][:2]
    columns = ("device", *(_name(use) for use in uses))
    rows = [(name, *(_fits(use, nbytes) for use in uses)) for name, nbytes in (*small, *some, *large)]
    return table(columns, rows, "Does it fit?", tuple(range(1, len(columns))))


def _fits(use: Use, nbytes: int) -> str:
    if use.total > nbytes:
        return f"no, {size(use.total - nbytes)} short"
    word = "fits" if use.total <= _TIGHT * nbytes else "tight"
    return f"{word}, {size(nbytes - use.total)} free"


def _name(use: Use) -> str:
    return f"{use.context:,} tokens, {use.kv}"
