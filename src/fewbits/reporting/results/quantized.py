"""What `quantize` made, and all that is known of it: the content of results.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.devices.units import size
from fewbits.inspection.sizes import size_of

if TYPE_CHECKING:
    from fewbits.calibration.text.coverage import Coverage
    from fewbits.planning import Plan
    from fewbits.planning.decision import Decision
    from fewbits.planning.rounds import Round
    from fewbits.reporting.schema import Gathered
    from fewbits.verification.embeddings import EmbeddingVerdict
    from fewbits.verification.metrics import Verdict


@dataclass(frozen=True)
class Quantized:
    """What `quantize` made, and all that is known of it."""

    path: Path
    artifact: Path
    plan: Plan
    verdict: Verdict | EmbeddingVerdict | None
    coverage: Coverage | None = None  # how well the calibration text represents use; None: nothing was calibrated
    outcomes: Mapping[str, Any] = field(default_factory=dict)  # by weight: the method used, and the damage on held-out samples
    rewrites: Sequence[Mapping[str, Any]] = ()  # by place: how channels were rescaled, and what it did on held-out samples
    decision: Decision | None = None  # how the plan came about, where a budget was given
    rounds: Sequence[Round] = ()  # every plan that was made and measured on the way to an accuracy
    gathered: Gathered | None = None  # what only a reader of the result asks for

    def __str__(self) -> str:
        judged = "not verified" if self.verdict is None else f"{str(self.verdict).splitlines()[0]}: {self.verdict.outcome}"
        made = f"{self.path}: {size(size_of(self.path))}, {self.plan.bits_per_weight:.3g} bits per weight"
        return f"{made}\n{self.plan.formats_text()}\n{judged}"

    def to_dict(self) -> dict[str, object]:
        return {
            "file": str(self.path),
            "artifact": str(self.artifact),
            "plan": json.loads(self.plan.to_json()),
            "verdict": self.verdict.to_dict() if self.verdict else None,
            "coverage": self.coverage.to_dict() if self.coverage else None,
            "outcomes": dict(self.outcomes),
            "rewrites": list(self.rewrites),
            "decision": self.decision.to_dict() if self.decision else None,
            "rounds": [asdict(each) for each in self.rounds],
        } | (self.gathered.to_dict() if self.gathered else {})
