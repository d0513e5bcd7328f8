"""What a target asks of an artifact, without packed weights: a dry run with it tells the size of a file before anything is quantized.

A plan without quantized weights needs no codes: its file is written from a draft, without an artifact on the disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.artifact import Provenance

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan


@dataclass(frozen=True)
class Draft:
    model: Model
    plan: Plan

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.model.weights

    @property
    def rest(self) -> tuple[str, ...]:
        return self.model.rest

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def layout(self) -> str | None:
        return self.model.layout

    @property
    def metadata_file(self) -> Path | None:
        return self.model.metadata_file

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @property
    def provenance(self) -> Provenance:
        return Provenance(self.model.published_as, self.model.fingerprint, version("fewbits"))

    def tensor(self, name: str) -> Tensor:
        return self.model.tensor(name)

    def parts(self, weight: Weight) -> Parts:
        fmt = formats.get(self.plan[weight.name].format)
        assert fmt.is_cast, "codes are chosen when it is made"
        return fmt.pack(self.model.load(weight), {})
