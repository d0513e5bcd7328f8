"""The method that does least damage to this weight on the half of the samples that it was not fitted to, then fitted to all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fewbits.methods import Outcome, gptq, rtn
from fewbits.methods.error_feedback import holdout

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.formats import Format

_PLAIN, _WEIGHED, _FEEDBACK = "rtn", "rtn, by importance", "gptq"  # as the report calls the candidates


class Auto:
    needs_statistics = True

    def quantize(self, w: Tensor, fmt: Format, statistics: WeightStatistics | None = None) -> Outcome:
        if fmt.is_cast or statistics is None or not statistics.has_importance:
            return rtn.METHOD.quantize(w, fmt, statistics)
        rows = holdout.some_rows(w, gptq.TRIAL_WEIGHTS)
        judged: dict[str, holdout.HeldOut] = {}
        for name, importance in ((_PLAIN, None), (_WEIGHED, statistics.importance(0))):
            grid = fmt.fit(w[rows], importance)
            codes = fmt.encode(w[rows], grid, importance)
            judged[name] = holdout.judge(w[rows], fmt, codes, grid, statistics, rows)
        damping = gptq.choose_damping(w, fmt, statistics) if statistics.has_hessian else None
        if damping and (by_gptq := gptq.judged(w, fmt, statistics, damping)):
            judged[_FEEDBACK] = by_gptq
        best = min(judged, key=lambda name: judged[name].damage)
        if damping and best == _FEEDBACK:
            outcome = gptq.solve(w, fmt, statistics, damping)
        else:
            outcome = Outcome(rtn.quantize(w, fmt, statistics.importance() if best == _WEIGHED else None), "rtn")
        damage = {name: entry.damage for name, entry in judged.items()}
        return replace(outcome, damage=damage, places={name: entry.places for name, entry in judged.items()})


METHOD = Auto()
