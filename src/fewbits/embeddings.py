"""How far a quantized encoder is from the float one: the cosine of every text's embedding, with an interval and a verdict.

A model without a head gives no logits, and so neither KL nor perplexity. Where the file says how a text's tokens are pooled, its one
vector is compared with the float model's, pooled alike; where it does not, a text counts with the mean cosine of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits.errors import InputError
from fewbits.verification import Thresholds, bootstrap_ci95

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.progress import Progress
    from fewbits.runtimes import Session
    from fewbits.texts import Window


@dataclass
class MeasuredTexts:
    """Numbers per text of one session, against the reference."""

    pooling: str | None = None
    tokens: int = 0
    cosines: list[float] = field(default_factory=list)
    difference: float = 0.0  # sums of squares
    base: float = 0.0

    def add(self, reference: Tensor, found: Tensor, tokens: int) -> None:  # both (vectors, width)
        import torch

        one, two = reference.double(), found.double()
        self.tokens += tokens
        self.cosines.append(float(torch.cosine_similarity(one, two).mean()))
        self.difference += float((one - two).square().sum())
        self.base += float(one.square().sum())

    @property
    def cosine(self) -> float:
        return float(np.mean(self.cosines))


@dataclass(frozen=True)
class EmbeddingVerdict:
    texts: int
    tokens: int
    pooling: str | None  # mean, cls or last: what was compared; None: token by token
    cosine_mean: float
    cosine_ci95: tuple[float, float]
    cosine_least: float  # of one text
    cosine_floor: float | None  # the float file in the same runtime: what the runtime's own arithmetic costs
    relative_error: float  # norm of the difference over the norm of the float embeddings
    bytes: int
    bits_per_weight: float
    runtime: str
    runtime_version: str
    thresholds: Thresholds
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"passed": self.passed}


def given_by(config: Any) -> bool:
    """Whether a model of this transformers config has no head: what it gives are embeddings. `BertModel` does, `GPT2LMHeadModel` not."""
    return any(name.endswith("Model") and not name.endswith("LMHeadModel") for name in config.architectures or [])


def check_thresholds(thresholds: Thresholds, config: Any) -> None:
    """What a model of this kind cannot be judged by is refused, before it is made."""
    embeds = given_by(config)
    asked = [name for name, value in vars(thresholds).items() if value is not None and (name == "min_cosine") != embeds]
    if asked:
        option = f"--{asked[0].replace('_', '-')}"
        hint = "use `--min-cosine`" if embeds else "use `--max-kl`, `--min-agreement` or `--max-ppl-ratio`"
        kind = "an encoder, which gives embeddings" if embeds else "a language model, which gives logits"
        raise InputError(f"`{option}` does not go with {kind}", hint)


def texts_of(windows: Sequence[Window], tokenizer: Any) -> list[Window]:
    """The same windows, each ended as the tokenizer ends a text: an encoder reads its closing token too."""
    end = list(tokenizer("").input_ids[1:])
    return [[*window[: len(window) - len(end)], *end] for window in windows]


def pooled(tokens: Tensor, how: str | None) -> Tensor:  # (tokens, width) -> (1, width), or as they are
    match how:
        case None:
            return tokens
        case "mean":
            return tokens.mean(0, keepdim=True)
        case "cls":
            return tokens[:1]
        case "last":
            return tokens[-1:]
    raise InputError(f"the file pools tokens by `{how}`, which has no float twin here", "use `--no-verify`")


def measure(
    reference: Session, sessions: Mapping[str, Session], texts: Sequence[Window], progress: Progress[Window]
) -> dict[str, MeasuredTexts]:
    """Every session on the same texts; the reference, which pools nothing, is computed once for all of them."""
    for session in sessions.values():
        if session.vocabulary != reference.vocabulary:
            found = f"the file has a vocabulary of {session.vocabulary}, the model one of {reference.vocabulary}"
            raise InputError(found, "is it the file of another model?")
    measured = {name: MeasuredTexts(session.pooling) for name, session in sessions.items()}
    for text in progress(texts, len(texts), "verifying"):
        base = reference.embeddings(text)
        for name, session in sessions.items():
            measured[name].add(pooled(base, session.pooling), session.embeddings(text), len(text))
    return measured


def judge(
    measured: MeasuredTexts,
    thresholds: Thresholds,
    *,
    nbytes: int,
    bits_per_weight: float,
    runtime: str,
    runtime_version: str,
    floor: MeasuredTexts | None = None,
) -> EmbeddingVerdict:
    cosines = np.array(measured.cosines)
    relative_error = math.sqrt(measured.difference / measured.base) if measured.base else math.inf
    failures = []
    if not (np.isfinite(cosines).all() and math.isfinite(measured.difference)):
        failures.append("the embeddings are not all finite")
    elif floor and not math.isfinite(floor.cosine):
        failures.append("the embeddings of the float file are not all finite")
    elif not math.isfinite(relative_error):
        failures.append("the float model's embeddings are all zero, or beyond all numbers")
    if thresholds.min_cosine is not None and not measured.cosine >= thresholds.min_cosine:
        failures.append(f"cosine {measured.cosine:.5f} is below {thresholds.min_cosine:g}")
    return EmbeddingVerdict(
        texts=len(cosines),
        tokens=measured.tokens,
        pooling=measured.pooling,
        cosine_mean=measured.cosine,
        cosine_ci95=bootstrap_ci95(cosines, block=1),  # texts are apart from each other, unlike neighbouring tokens
        cosine_least=float(cosines.min()),
        cosine_floor=floor.cosine if floor else None,
        relative_error=relative_error,
        bytes=nbytes,
        bits_per_weight=bits_per_weight,
        runtime=runtime,
        runtime_version=runtime_version,
        thresholds=thresholds,
        failures=tuple(failures),
    )
