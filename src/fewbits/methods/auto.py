"""Whichever method does least damage to this weight on the half of the samples that it was not fitted to, then run on all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fewbits import holdout
from fewbits.methods import Outcome, gptq, rtn
from fewbits.rounding import encode

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.formats import Format

_PLAIN, _WEIGHED, _FEEDBACK = "rtn", "rtn, by importance", "gptq"  # as the report calls the candidates


class Auto:
    needs_statistics = True

    def quantize(self, w: Tensor, fmt: Format, statistics: WeightStatistics | None = None) -> Outcome:
        if fmt.levels is None or statistics is None or not statistics.has_importance:
            return rtn.METHOD.quantize(w, fmt, statistics)
        rows = holdout.some_rows(w, gptq.TRIAL_WEIGHTS)
        held: dict[str, holdout.Held] = {}
        for name, importance in ((_PLAIN, None), (_WEIGHED, statistics.importance(0))):
            grid = fmt.fit(w[rows], importance)
            codes = encode(w[rows], fmt.levels, *fmt.affine(grid))
            held[name] = holdout.judge(w[rows], fmt, codes, grid, statistics, rows)
        damping = gptq.choose_damping(w, fmt, statistics) if statistics.has_hessian else 0.0
        if statistics.has_hessian and (found := gptq.judged(w, fmt, statistics, damping)):
            held[_FEEDBACK] = found
        best = min(held, key=lambda name: held[name].damage)
        if best == _FEEDBACK:
            outcome = gptq.solve(w, fmt, statistics, damping)
        else:
            outcome = Outcome(rtn.quantize(w, fmt, statistics.importance() if best == _WEIGHED else None), "rtn")
        damage, places = {name: entry.damage for name, entry in held.items()}, {name: entry.places for name, entry in held.items()}
        return replace(outcome, damage=damage, places=places)


METHOD = Auto()
