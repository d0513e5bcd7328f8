"""What fewbits does with a model of the zoo, step by step: each a result or the reason why not. tests/zoo and tools/zoo_table.py ask it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fewbits
from fewbits import model as models
from fewbits.errors import FewbitsError
from fewbits.model.weights import TOWER
from fewbits.verification import embeddings

SAMPLES, LENGTH, TOKENS = 96, 128, 2048  # enough for a forecast within its bar; half a minute for all steps of a tiny model
SIZE, WITH_TOWERS = "4.5bpw", "10bpw"


@dataclass(frozen=True)
class Tried:
    """One step: what came out, or why nothing did."""

    made: bool
    said: str = ""
    kl: float | None = None  # measured
    predicted: float | None = None
    floor: float | None = None  # of the float file in the same runtime
    bits: float | None = None  # per weight


class Trials:
    """The steps on one model, in a folder of its own. Statistics are taken once."""

    def __init__(self, folder: Path, work: Path, converter: Path | None) -> None:
        self.folder, self.work, self.converter = folder, work, converter
        self.statistics = work / "statistics"

    def calibrate(self) -> Tried:
        def run() -> Tried:
            made = fewbits.calibrate(self.folder, self.statistics, samples=SAMPLES, length=LENGTH)
            seen = sum(made.statistics.site(name) is not None for name in made.statistics.names)
            return Tried(True, f"{seen} of {len(made.statistics.names)}")

        return _tried(run)

    def plan(self) -> Tried:
        """Every weight measured in formats of the artifact, and a plan of the size; of a larger one where towers stay in float."""

        def run() -> Tried:
            table = self.work / "sensitivity.json"
            fewbits.measure(self.folder, table, stats=self.statistics, to="fewbits", formats=["q3_k", "q4_k", "q6_k", "int4_g32", "q8_0"])
            towers = any(weight.kind == TOWER for weight in models.open(self.folder).weights)
            decided = fewbits.plan(self.folder, table, to="fewbits", size=WITH_TOWERS if towers else SIZE)
            return Tried(True, predicted=decided.plan.kl, bits=decided.plan.bits_per_weight)

        return _tried(run)

    def gguf(self) -> Tried:
        """By size, judged in llama.cpp; an encoder in one format, judged by the cosine of its embeddings."""
        options: dict[str, Any] = {"length": LENGTH, "tokens": TOKENS, "converter": None if self.converter is None else str(self.converter)}
        if embeddings.given_by(models.open(self.folder).config):
            return self._quantize("m.gguf", format="q4_k", samples=SAMPLES, **options)
        return self._quantize("m.gguf", size=SIZE, stats=self.statistics, **options)

    def onnx(self) -> Tried:
        return self._quantize("m.onnx", format="int4_g32", method="rtn", length=32, tokens=128)

    def genai(self) -> Tried:
        return self._quantize("m.genai", format="int4_g32", method="rtn", length=32, tokens=128)

    def compressed(self) -> Tried:
        return self._quantize("m.ct", format="int4_g32", method="rtn", length=32, tokens=128)

    def _quantize(self, name: str, **options: Any) -> Tried:
        def run() -> Tried:
            made = fewbits.quantize(self.folder, self.work / name, **options)
            verdict: Any = made.verdict
            if hasattr(verdict, "cosine_mean"):
                return Tried(
                    True,
                    f"cosine {verdict.cosine_mean:.5f}",
                    1 - verdict.cosine_mean,
                    None,
                    1 - verdict.cosine_floor,
                    verdict.bits_per_weight,
                )
            return Tried(True, "", verdict.kl_mean, made.plan.kl, verdict.kl_floor, verdict.bits_per_weight)

        return _tried(run)


def _tried(run: Callable[[], Tried]) -> Tried:
    """A refusal is an answer; any other exception is a bug and is not caught here."""
    try:
        return run()
    except FewbitsError as failure:
        return Tried(False, str(failure.args[0]))
