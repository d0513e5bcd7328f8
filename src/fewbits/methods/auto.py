"""Whichever method does least damage to this weight on the half of the samples that it was not fitted to, then run on all of them."""

from __future__ import annotations

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
        damage = {}
        for name, importance in ((_PLAIN, None), (_WEIGHED, statistics.importance(0))):
            grid = fmt.fit(w[rows], importance)
            codes = encode(w[rows], fmt.levels, *fmt.affine(grid))
            damage[name] = holdout.damage(w[rows], fmt, codes, grid, statistics, rows)
        if statistics.has_hessian:
            damping = gptq.choose_damping(w, fmt, statistics)
            damage[_FEEDBACK] = gptq.damage_on_other_half(w, fmt, statistics, damping)
        best = min(damage, key=lambda name: damage[name])
        if best == _FEEDBACK:
            return gptq.solve(w, fmt, statistics, damping, damage)
        return Outcome(rtn.quantize(w, fmt, statistics.importance() if best == _WEIGHED else None), "rtn", damage=damage)


METHOD = Auto()
