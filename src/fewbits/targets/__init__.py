"""Containers that a runtime loads. One file per target; the file is the registration.

A target is asked before planning what it can carry and at what price, so that no plan is undeployable or mispriced. It
recognises structure (levels, run, offset), not names: int4_g32 and q4_0 are the same values in two layouts.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import FewbitsError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fewbits.activations import Activation
    from fewbits.artifact import Artifact
    from fewbits.drafting import Draft
    from fewbits.formats import Format
    from fewbits.model import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress


class WrongFileError(FewbitsError):
    """What was written is not what was planned."""

    exit_code = 1


class Target(ABC):
    name: str  # as `--to` takes it
    about: str
    file_name: str  # what a folder given as output receives: `model.gguf`
    runtime: str  # the runtime that `verify` uses by default: a name in fewbits.runtimes
    candidates: tuple[str, ...]  # the formats that a plan chooses from unless told: those that are sometimes the best at their size
    marker: str | None = None  # where the output is a folder: the file in it that says so
    takes_drafts: bool = False  # `write_draft` is there
    together: tuple[str, ...] = ()  # patterns as `--together` takes them: what a runtime fuses, a budget gives one format

    @property
    def suffix(self) -> str:
        return Path(self.file_name).suffix

    @abstractmethod
    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        """Why this target cannot carry this weight in this format; None if it can."""

    @abstractmethod
    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int:
        """Tensor bytes in the file, exactly."""

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        """Why this target cannot say that this weight's input is to be rounded so; None if it can."""
        return f"{self.name} files say nothing about activations"

    def accepts_kv(self, kv: str) -> str | None:
        """Why this target cannot say that the KV cache is to have this format; None if it can."""
        return f"{self.name} files say nothing about the KV cache"

    @abstractmethod
    def activation_block(self, weight: Weight, fmt: Format) -> int | None:
        """Columns over which the runtime rounds this weight's input to 8 bits before it multiplies; None: it does not."""

    @abstractmethod
    def supports(self, config: Any, tokenizer: Any) -> str | None:
        """Why a model with this transformers config and tokenizer cannot be written; None if it can. Asked before any work."""

    def accepts_plan(self, plan: Plan, weights: Iterable[Weight]) -> str | None:
        """Why a plan cannot be written although each of its formats can; None if it can."""
        return None

    @abstractmethod
    def overhead(self, draft: Draft) -> int:
        """Bytes of the output that are not the planned weights' tensors, by a dry run: header, graph, tokenizer, norms, padding."""

    @abstractmethod
    def write(self, artifact: Artifact, path: Path, progress: Progress[Any]) -> None:
        """The complete file at `path` (the caller names a temporary place and renames it)."""

    def write_draft(self, draft: Draft, path: Path, progress: Progress[Any]) -> None:
        """The same of a draft whose weights are all casts: a float file, without an artifact as large as the model."""
        raise NotImplementedError

    @abstractmethod
    def written(self, path: Path) -> dict[str, str]:
        """The type of every weight in a file, read back by somebody else's reader."""

    @abstractmethod
    def written_as(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> str:
        """What `written` must call this weight in this format: several formats may be one type in the file."""

    def check(self, plan: Plan, weights: Iterable[Weight], path: Path) -> None:
        """Every type in the file is the plan's, tensor by tensor."""
        from fewbits import formats

        found = self.written(path)
        for weight in weights:
            entry = plan[weight.name]
            wanted = self.written_as(weight, formats.get(entry.format), entry.activation)
            if (own := found.get(weight.name) or found.get(weight.parameter)) != wanted:
                says = f"has `{weight.name}` as {own}" if own else f"has no `{weight.name}`"
                raise WrongFileError(
                    f"the {self.name} file {says}, and the plan says {wanted}", "this is a bug of fewbits: please report it"
                )


@cache
def all() -> dict[str, Target]:
    modules = sorted(m.name for m in pkgutil.iter_modules(__path__))
    found = (getattr(importlib.import_module(f"{__name__}.{name}"), "TARGET", None) for name in modules)
    return {target.name: target for target in found if target is not None}


def get(name: str) -> Target:
    if name.lower() not in all():
        raise InputError(f"no target is named `{name}`", f"known targets: {', '.join(all())}")
    return all()[name.lower()]
