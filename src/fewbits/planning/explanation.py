"""Why a weight got its format: all formats it could have, and what each would cost or save."""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from fewbits.errors import InputError

if TYPE_CHECKING:
    from fewbits.planning.decision import Decision


@dataclass(frozen=True)
class Alternative:
    format: str
    nbytes: int
    kl: float
    more_bytes: int  # than the chosen one
    more_kl: float
    chosen: bool


@dataclass(frozen=True)
class Explanation:
    weight: str
    shape: tuple[int, int]
    reason: str
    share_of_bytes: float  # of the whole plan's
    share_of_kl: float  # of the KL predicted for all measured weights
    alternatives: tuple[Alternative, ...]  # by rising size
    refused: tuple[tuple[str, str], ...]  # (format, why not), of the formats measured for other weights

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def explain(decision: Decision, name: str) -> Explanation:
    from fewbits import formats, planning

    whole, plan = decision.allocator, decision.plan
    by_name = {weight.name: (weight, choices) for group, choices in zip(whole.groups, whole.choices, strict=True) for weight in group}
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.3)
        raise InputError(f"no weight is named `{name}`", f"did you mean `{near[0]}`?" if near else "names look like `model.layers.0...`")
    weight, choices = by_name[name]
    entry = plan[name]
    if (kl := entry.kl) is None:  # then alternatives cannot be compared with it
        raise InputError(f"`{name}` has the format {entry.format} by {entry.method}, which was not measured", "measure with `--formats`")
    alternatives = []
    for choice in choices:
        choice_kl = whole.kl(weight, choice.format)
        nbytes = whole.target.nbytes(weight, choice.format)
        chosen = choice.format.name == entry.format
        alternatives.append(Alternative(choice.format.name, nbytes, choice_kl, nbytes - entry.nbytes, choice_kl - kl, chosen))
    known = dict.fromkeys(fmt for row in whole.table.rows.values() for fmt in row)
    refused = [(fmt, why) for fmt in known if (why := planning.refuses(weight, whole.target, formats.get(fmt)))]
    whole_kl = math.fsum(each.kl for each in plan.entries if each.kl is not None)
    shares = entry.nbytes / plan.nbytes, kl / whole_kl if whole_kl else 0.0
    return Explanation(name, weight.shape, entry.reason, *shares, tuple(alternatives), tuple(refused))
