"""An artifact in, a file or folder that a runtime loads out. Every folder here is a target; having the folder registers it.

Planning asks a target which formats it can store and in how many bytes, so that every plan can be written and its size is exact. A target
recognises formats by structure (levels, group, offset), not by name: int4_g32 and q4_0 are the same values in two layouts.

export.py         the verb: which target, and a file that holds what the plan says
plan.py           the verb: a plan for a target, from a table of sensitivities
pricing.py        the size of a plan in a target's file, before anything is quantized
running.py        how such a file is run: the next command, with the context that fits
card.py           the model card beside it; publishing.py sends both to the hub
stored_tensor.py  what readers of such files give
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

    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.formats import Format
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.targets.running import Command


class WrongFileError(FewbitsError):
    """The file does not hold what the plan says."""

    exit_code = 1


class Target(ABC):
    name: str  # as `--to` takes it
    about: str
    file_name: str  # what a folder given as output receives: `model.gguf`
    runtime: str  # the runtime that `verify` uses by default: a name in fewbits.verification.runtimes
    candidates: tuple[str, ...]  # the formats that a plan chooses from by default: those that are sometimes the best of their size
    marker: str | None = None  # where the output is a folder: a file that every such folder has
    takes_drafts: bool = False  # it has `write_draft`
    together: tuple[str, ...] = ()  # patterns like those of `--together`: layers that a runtime fuses get one format

    @property
    def suffix(self) -> str:
        return Path(self.file_name).suffix

    @abstractmethod
    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        """Why this target cannot store this weight in this format; None if it can."""

    @abstractmethod
    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int:
        """The exact bytes of its tensors in the file."""

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        """Why this target cannot store that this weight's input is to be rounded; None if it can."""
        return f"{self.name} files say nothing about activations"

    def accepts_kv(self, kv: str) -> str | None:
        """Why this target cannot store this format of the KV cache; None if it can."""
        return f"{self.name} files say nothing about the KV cache"

    @abstractmethod
    def activation_block(self, weight: Weight, fmt: Format) -> int | None:
        """Columns over which the runtime rounds this weight's input to 8 bits before it multiplies; None: it does not."""

    @abstractmethod
    def supports(self, config: Any, tokenizer: Any) -> str | None:
        """Why a model with this transformers config and tokenizer cannot be written; None if it can. Called before any work."""

    def accepts_plan(self, plan: Plan, weights: Iterable[Weight]) -> str | None:
        """Why these formats cannot be combined in one file, although each is accepted; None if they can."""
        return None

    @abstractmethod
    def overhead(self, draft: Draft) -> int:
        """Bytes of the output beside the tensors of the planned weights, by a dry run: header, graph, tokenizer, norms, padding."""

    @abstractmethod
    def write(self, artifact: Artifact, path: Path, progress: Progress[Any]) -> None:
        """The complete file at `path` (a temporary name; the caller renames it)."""

    def write_draft(self, draft: Draft, path: Path, progress: Progress[Any]) -> None:
        """The same from a draft whose weights are all unquantized: needs no artifact, which would be as large as the model."""
        raise NotImplementedError

    @abstractmethod
    def written(self, path: Path) -> dict[str, str]:
        """The type of every weight in a file, read by a reader that fewbits did not write."""

    @abstractmethod
    def written_as(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> str:
        """The type that `written` gives for this weight in this format: several formats may be one type in the file."""

    def loaded_by(self, path: Path, shown: Path) -> Path:
        """What a runtime is given of this output; `shown` is the output as its user has it."""
        return shown

    @property
    def library(self) -> str:
        """What the hub calls the library that loads such a file."""
        return self.name

    @abstractmethod
    def how_to_run(self, shown: Path, context: int | None, embeds: bool) -> tuple[Command, ...]:
        """What to type next, the usual way first. `shown`: the file or folder as its user has it. `context`: tokens to make room for,
        where that is known. `embeds`: it is an encoder."""

    def check(self, plan: Plan, weights: Iterable[Weight], path: Path) -> None:
        """Raises an error if the type of a weight in the file is not the plan's."""
        from fewbits import formats

        types = self.written(path)
        for weight in weights:
            entry = plan[weight.name]
            wanted = self.written_as(weight, formats.get(entry.format), entry.activation)
            if (stored := types.get(weight.name) or types.get(weight.parameter)) != wanted:
                says = f"has `{weight.name}` as {stored}" if stored else f"has no `{weight.name}`"
                raise WrongFileError(
                    f"the {self.name} file {says}, and the plan says {wanted}", "this is a bug of fewbits: please report it"
                )


@cache
def all() -> dict[str, Target]:
    folders = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    known: list[Target] = [importlib.import_module(f"{__name__}.{name}").TARGET for name in folders]
    return {target.name: target for target in known}


def get(name: str) -> Target:
    if name.lower() not in all():
        raise InputError(f"no target is named `{name}`", f"known targets: {', '.join(all())}")
    return all()[name.lower()]
