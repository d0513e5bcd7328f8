"""`fewbits compare FILE... --against MODEL`: the comparison of verification/comparison/, and the page of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.calibration import MEMORY, Paths
from fewbits.model import placement
from fewbits.progress import silent
from fewbits.reporting.page import report
from fewbits.reporting.schema import NAME
from fewbits.store.files import Staged, to_json
from fewbits.verification.comparison import trial
from fewbits.verification.files import TOKENS

if TYPE_CHECKING:
    from fewbits.model import Model
    from fewbits.progress import Progress
    from fewbits.verification.comparison.figures import Comparison


def compare_files(
    files: str | Path | Sequence[str | Path],
    against: str | Path | Model,
    *,
    out: str | Path | None = None,
    data: Paths = (),
    weights: str | Mapping[str, float] | None = None,
    length: int | str | Mapping[str, int] | None = None,
    tokens: int = TOKENS,
    memory: int = MEMORY,
    device: str = placement.AUTO,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Comparison:
    """Anybody's files of one model, each in the runtime it is meant for, beside the float model on the same tokens.

    `files`: paths, or folders that hold some; what no runtime takes is listed with the reason. `data`, `weights`, `length`: text as for
    `verify`. `out`: a page to write; the folder OUT.work beside it keeps what is judged, so that the same call resumes there.
    """
    work = None if out is None else Path(out).with_name(f"{Path(out).name}.work")
    compared = trial.compare_files(
        files, against, data=data, weights=weights, length=length, tokens=tokens, work=work, memory=memory, device=device,
        offline=offline, progress=progress,
    )  # fmt: skip
    if out is not None and work is not None:
        with Staged(work / NAME) as staged:
            staged.write_text(to_json(compared.to_dict()))
        report(work, out)
    return compared
