"""What `demo` made: the content of its results.json, which holds that of a `quantize` for one of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fewbits.planning import Plan
    from fewbits.planning.decision import Decision
    from fewbits.verification.crosscheck import CrossCheck
    from fewbits.verification.metrics import Verdict


@dataclass(frozen=True)
class MadeFile:
    """One file: a row of the table."""

    format: str
    target: str
    file: str
    plan: Plan
    verdict: Verdict
    crosscheck: CrossCheck
    decision: Decision | None = None  # of a planned one


@dataclass(frozen=True)
class Demo:
    """All files, and the parts of the report about one of them."""

    model: str
    folder: str
    rows: tuple[MadeFile, ...]
    skipped: tuple[str, ...]  # runtimes that are not here, and how to get them
    detail: Mapping[str, object] | None = None  # all about one planned file, as `quantize` would write it

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.verdict.passed and row.crosscheck.agrees for row in self.rows)

    def __str__(self) -> str:
        files = ", ".join(f"{row.file} (KL {row.verdict.kl_mean:.3g})" for row in self.rows)
        return f"{self.model} in {self.folder}\n{len(self.rows)} files: {files}\n{'passed' if self.passed else 'failed'}"

    def to_dict(self) -> dict[str, object]:
        rows = [
            {"format": row.format, "target": row.target, "file": row.file, "fallbacks": len(row.plan.fallbacks), **row.verdict.to_dict()}
            | {"crosscheck": asdict(row.crosscheck) | {"limit": row.crosscheck.limit, "agrees": row.crosscheck.agrees}}
            for row in self.rows
        ]
        return {
            "model": self.model, "folder": self.folder, "rows": rows, "skipped": list(self.skipped), "passed": self.passed,
            "detail": self.detail,
        }  # fmt: skip
