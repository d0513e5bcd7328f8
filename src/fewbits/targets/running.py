"""How a written file is run: the next command, to copy, with the longest context for which this machine has room.

Each target says its own commands (`Target.how_to_run`); here is what they have in common.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.devices import host
from fewbits.errors import FewbitsError
from fewbits.planning import footprint

if TYPE_CHECKING:
    from fewbits.targets import Target

PROMPT = "Once upon a time"
_SHARE = 0.75  # of this machine's memory: other programs need the rest


@dataclass(frozen=True)
class Command:
    what: str  # in a few words
    text: str
    language: str = "sh"  # or python


@dataclass(frozen=True)
class HowToRun:
    commands: tuple[Command, ...]
    context: int | None = None  # tokens for which this machine has room; None: not known

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def how_to_run(target: Target, path: Path, config: Any, shown: Path | None = None) -> HowToRun:
    """`shown`: the path as the reader of the command has it, if that is not where the file is now."""
    context = None if gives_embeddings(config) else fitting_context(config, path)
    return HowToRun(target.how_to_run(target.loaded_by(path, shown or path), context, gives_embeddings(config)), context)


def fitting_context(config: Any, path: Path) -> int | None:
    """The model's own limit, or the largest power of two up to it for which three quarters of this machine's memory suffice."""
    memory = host.total_memory()
    weights = path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) if hasattr(config, "get_text_config") else None
    if memory is None or not isinstance(limit, int) or limit < 1:
        return None
    try:
        room = footprint.largest_context(footprint.shape(config), weights, int(_SHARE * memory), footprint.Use(context=1), limit)
    except (FewbitsError, AttributeError, TypeError, ValueError):  # a config that the arithmetic does not know
        return None
    return room if room == limit else 1 << (room.bit_length() - 1) if room else None


def gives_embeddings(config: Any) -> bool:
    """Whether a model of this transformers config has no head and so gives embeddings: `BertModel` does, `GPT2LMHeadModel` does not."""
    named = getattr(config, "architectures", None) or []
    return any(name.endswith("Model") and not name.endswith("LMHeadModel") for name in named)
