"""How far a quantized encoder is from the float one: the cosine of every text's embedding, with an interval and a verdict.

A model without a head gives no logits, and so neither KL nor perplexity. If the file says how the tokens of a text are pooled, the pooled
vector is compared with the float model's, pooled alike; otherwise a text counts with the mean cosine of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits.errors import InputError
from fewbits.planning.accuracy import Thresholds
from fewbits.targets.running import gives_embeddings
from fewbits.verification.metrics import Judged, bootstrap_ci95, check_vocabularies

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.text.windows import Window
    from fewbits.progress import Progress
    from fewbits.verification.session import Session


@dataclass
class MeasuredEmbeddings:
    """One session against the reference, text by text."""

    pooling: str | None = None
    tokens: int = 0
    cosines: list[float] = field(default_factory=list)
    difference: float = 0.0  # sum of squares
    base: float = 0.0  # sum of squares of the reference

    def add(self, reference: Tensor, vectors: Tensor, tokens: int) -> None:  # both (vectors, width)
        import torch

        one, two = reference.double(), vectors.double()
        self.tokens += tokens
        self.cosines.append(float(torch.cosine_similarity(one, two).mean()))
        self.difference += float((one - two).square().sum())
        self.base += float(one.square().sum())

    @property
    def cosine(self) -> float:
        return float(np.mean(self.cosines))


@dataclass(frozen=True)
class EmbeddingVerdict(Judged):
    texts: int
    tokens: int
    pooling: str | None  # mean, cls or last; None: compared token by token
    cosine_mean: float
    cosine_ci95: tuple[float, float]
    cosine_least: float  # of one text
    cosine_floor: float | None  # of the float file in the same runtime: the error of the runtime itself
    relative_error: float  # norm of the difference over the norm of the float embeddings
    bytes: int
    bits_per_weight: float
    runtime: str
    runtime_version: str
    thresholds: Thresholds
    failures: tuple[str, ...]
    reference: str | None = None  # what it was compared with, if that is no float model

    def __str__(self) -> str:
        low, high = self.cosine_ci95
        return (
            f"cosine {self.cosine_mean:.5g} ({low:.5g} to {high:.5g}) to the {self.reference or 'float model'}, "
            f"on {self.texts} texts in {self.runtime}\n"
            f"at least {self.cosine_least:.5g} of one text; relative error {self.relative_error:.2%}\n{self.outcome}"
        )


given_by = gives_embeddings


def check_thresholds(thresholds: Thresholds, config: Any) -> None:
    """Refuses, before any work, thresholds that do not apply to a model of this kind."""
    embeds = given_by(config)
    asked = [name for name, value in vars(thresholds).items() if value is not None and (name == "min_cosine") != embeds]
    if asked:
        option = f"--{asked[0].replace('_', '-')}"
        hint = "use `--min-cosine`" if embeds else "use `--max-kl`, `--min-agreement` or `--max-ppl-ratio`"
        kind = "an encoder, which gives embeddings" if embeds else "a language model, which gives logits"
        raise InputError(f"`{option}` does not go with {kind}", hint)


def texts_of(windows: Sequence[Window], tokenizer: Any) -> list[Window]:
    """The same windows, each ending with the tokens that the tokenizer puts at the end of a text: an encoder was trained with them."""
    end = list(tokenizer("").input_ids[1:])
    return [[*window[: len(window) - len(end)], *end] for window in windows]


def pooled(tokens: Tensor, how: str | None) -> Tensor:  # (tokens, width) -> (1, width); None: unchanged
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


def compare_embeddings(
    reference: Session, sessions: Mapping[str, Session], texts: Sequence[Window], progress: Progress[Window]
) -> dict[str, MeasuredEmbeddings]:
    """Runs every session on the same texts, and the reference, which does not pool, once for all of them."""
    check_vocabularies(reference, sessions)
    measured = {name: MeasuredEmbeddings(session.pooling) for name, session in sessions.items()}
    for text in progress(texts, len(texts), "verifying"):
        base = reference.embeddings(text)
        for name, session in sessions.items():
            measured[name].add(pooled(base, session.pooling), session.embeddings(text), len(text))
    return measured


def judge(
    measured: MeasuredEmbeddings,
    thresholds: Thresholds,
    *,
    nbytes: int,
    bits_per_weight: float,
    runtime: str,
    runtime_version: str,
    floor: MeasuredEmbeddings | None = None,
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
        cosine_ci95=bootstrap_ci95(cosines, block=1),  # texts are independent of each other, unlike neighbouring tokens
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
