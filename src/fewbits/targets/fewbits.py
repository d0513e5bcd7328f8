"""The artifact folder itself: every format, activation and KV cache, run by torch as the plan says. The one target that loses nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.targets import Target

if TYPE_CHECKING:
    from fewbits.activations import Activation
    from fewbits.artifact import Artifact
    from fewbits.drafting import Draft
    from fewbits.formats import Format
    from fewbits.model import Weight
    from fewbits.progress import Progress


_PER_PART = 400  # of the files' headers and of fewbits.json: a part's name, type, place, and how its codes were chosen; an upper bound


class Fewbits(Target):
    name = "fewbits"
    about = "a folder for torch: every format, and rounded activations and KV cache, emulated exactly"
    file_name = "model.fewbits"
    runtime = "torch"
    candidates = (
        "int3_g32",
        "int4_g128",
        "int4_g64",
        "int4_g32",
        "int4_g32_asym",
        "int6_g32",
        "fp8_e4m3_channel",
        "int8_channel",
        "int8_g32",
        "fp16",
    )
    marker = "fewbits.json"

    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        return None

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        return None

    def accepts_kv(self, kv: str) -> str | None:
        return None

    def nbytes(self, weight: Weight, fmt: Format) -> int:
        return fmt.nbytes(weight.shape)

    def activation_block(self, weight: Weight, fmt: Format) -> int | None:
        return None  # torch computes in float unless the plan says otherwise

    def supports(self, config: Any, tokenizer: Any) -> str | None:
        return None

    def overhead(self, draft: Draft) -> int:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="fewbits-") as scratch:
            draft.model.checkpoint.save_assets(Path(scratch))
            beside = sum(file.stat().st_size for file in Path(scratch).iterdir())
        rest = sum(tensor.nbytes for tensor in map(draft.tensor, draft.rest))
        described = 2 * len(draft.plan.to_json()) + _PER_PART * (len(draft.rest) + 4 * len(draft.weights))
        return beside + rest + described

    def write(self, artifact: Artifact, path: Path, progress: Progress[Any]) -> None:
        from fewbits import planning

        files = sorted(file for file in artifact.path.iterdir() if file.is_file())
        path.mkdir()
        for file in progress(files, len(files), "copying"):
            shutil.copyfile(file, path / file.name)
        # the artifact may have been made for another target, whose prices its plan holds
        plan = planning.read((path / "plan.json").read_text(), artifact.weights, self)
        (path / "plan.json").write_text(plan.to_json())


TARGET = Fewbits()
