"""A GGUF that anybody wrote, as an artifact: its packed rows are those of fewbits' formats of the same names, in the order of the module.

Nothing is decoded or copied before a kernel asks for it, but for a matrix that the file holds in pieces of several types.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, model
from fewbits.artifact import Artifact, write
from fewbits.errors import InputError
from fewbits.methods import Outcome
from fewbits.model.gguf.checkpoint import GgufFile
from fewbits.planning import Entry, Plan
from fewbits.progress import silent

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress


class PackedGguf(Artifact):
    def __init__(self, path: Path) -> None:
        self.path, self.layout, self.outcomes = path, None, {}
        self._gguf = GgufFile(path)
        self._source = model.Model(self._gguf)
        self.weights, self.rest = self._source.weights, self._source.rest
        self.plan = Plan("gguf", tuple(self._entry(weight) for weight in self.weights))

    @cached_property
    def config(self) -> Any:
        return self._source.config

    @cached_property
    def tokenizer(self) -> Any:
        return self._source.tokenizer

    def parts(self, weight: Weight) -> Parts:
        fmt = formats.get(self.plan[weight.name].format)
        ((name, spec),) = fmt.parts(weight.shape).items()
        rows = self._gguf.packed_rows(self._source._stored(weight.parameter), weight.expert)
        if rows is None:
            return {name: self._source.load(weight)}
        return {name: rows.reshape(spec.shape)}

    def tensor(self, name: str) -> Tensor:
        return self._source.tensor(name)

    def check(self, progress: Progress[Any] = silent) -> None:
        """An error if a weight does not decode to finite values."""
        for weight in progress(self.weights, len(self.weights), "checking weights"):
            self._source.load(weight)

    def as_folder(self, folder: Path) -> Artifact:
        """The same as an artifact on disk, for transformers."""

        def stored() -> Iterator[tuple[Weight, Outcome]]:
            for weight in self.weights:
                yield weight, Outcome(self.parts(weight), "rtn")

        return write(self._source, self.plan, folder, stored())

    def _entry(self, weight: Weight) -> Entry:
        kind = self._gguf.packed_type(self._source._stored(weight.parameter))
        name = {"F16": "fp16", "F32": "fp32", None: "fp32"}.get(kind, str(kind).lower())
        if name not in formats.all():
            raise InputError(
                f"`{weight.name}` of `{self.path.name}` is stored as {kind}, for which there is no kernel here", "run it in llama.cpp"
            )
        return Entry(weight.name, weight.shape, name, "rtn", "as it is stored", formats.get(name).nbytes(weight.shape))
