"""Verdicts on models without a head: cosines equal a slow twin's, every figure can fail, and what does not belong is refused first."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fewbits.errors import InputError
from fewbits.planning.accuracy import Thresholds
from fewbits.progress import silent
from fewbits.verification import embeddings
from fewbits.verification.embeddings import EmbeddingVerdict, MeasuredEmbeddings
from fewbits.verification.session import Session

TEXTS = [[1, 4, 2, 8, 5], [7, 3, 3], [9, 0, 2, 6]]


class Fixed(Session):
    """Vectors by a formula of the tokens: a runtime that can be computed by hand."""

    vocabulary = 11

    def __init__(self, shift: float = 0.0, pooling: str | None = None) -> None:
        self.shift, self.pooling = shift, pooling

    def logits(self, tokens: list[int]) -> Tensor:
        raise AssertionError("an encoder has none")

    def tokens(self, tokens: list[int]) -> list[list[float]]:
        return [
            [math.cos(token * (j + 1)) + self.shift * math.sin(3 * token + j * place) for j in range(6)]
            for place, token in enumerate(tokens)
        ]

    def embeddings(self, tokens: list[int]) -> Tensor:
        vectors = self.tokens(tokens)
        match self.pooling:
            case "mean":
                vectors = [[sum(column) / len(tokens) for column in zip(*vectors, strict=True)]]
            case "cls":
                vectors = vectors[:1]
            case "last":
                vectors = vectors[-1:]
        return torch.tensor(vectors)


def slow_cosine(one: list[float], two: list[float]) -> float:
    dot = sum(a * b for a, b in zip(one, two, strict=True))
    return dot / math.sqrt(sum(a * a for a in one) * sum(b * b for b in two))


def measured(shift: float, pooling: str | None = None) -> MeasuredEmbeddings:
    return embeddings.compare_embeddings(Fixed(), {"test": Fixed(shift, pooling)}, TEXTS, silent)["test"]


def verdict(result: MeasuredEmbeddings, thresholds: Thresholds = Thresholds(), floor: MeasuredEmbeddings | None = None) -> EmbeddingVerdict:
    return embeddings.judge(result, thresholds, nbytes=1, bits_per_weight=1.0, runtime="r", runtime_version="1", floor=floor)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_texts_cosine_is_that_of_its_pooled_vectors(pooling: str) -> None:
    expected = []
    for text in TEXTS:
        base, test = (Fixed(shift, pooling).embeddings(text)[0].tolist() for shift in (0.0, 0.3))
        expected.append(slow_cosine(base, test))
    result = measured(0.3, pooling)
    assert result.cosines == pytest.approx(expected, rel=1e-6)
    v = verdict(result)
    assert (v.texts, v.tokens, v.pooling) == (3, 12, pooling)
    assert v.cosine_mean == pytest.approx(sum(expected) / 3, rel=1e-6) and v.cosine_least == min(result.cosines)
    assert v.cosine_least < v.cosine_ci95[0] + 1e-12 < v.cosine_ci95[1] < 1


def test_without_pooling_a_text_has_the_mean_cosine_of_its_tokens() -> None:
    expected, away, norm = [], 0.0, 0.0
    for text in TEXTS:
        pairs = list(zip(Fixed().tokens(text), Fixed(0.3).tokens(text), strict=True))
        expected.append(sum(slow_cosine(*pair) for pair in pairs) / len(pairs))
        away += sum((a - b) ** 2 for one, two in pairs for a, b in zip(one, two, strict=True))
        norm += sum(a * a for one, _ in pairs for a in one)
    result = measured(0.3)
    assert result.cosines == pytest.approx(expected, rel=1e-6)
    assert verdict(result).relative_error == pytest.approx(math.sqrt(away / norm), rel=1e-5)


def test_a_threshold_fails_a_verdict_and_itself_passes() -> None:
    assert verdict(measured(0.0), Thresholds(min_cosine=1 - 1e-12)).passed
    failed = verdict(measured(0.3), Thresholds(min_cosine=0.999999), floor=measured(0.01))
    assert not failed.passed and "is below 0.999999" in failed.failures[0]
    assert failed.cosine_floor is not None and failed.cosine_mean < failed.cosine_floor < 1
    assert failed.to_dict()["passed"] is False


def test_values_that_are_not_finite_fail() -> None:
    result = measured(0.1)
    result.add(torch.ones(1, 6), torch.full((1, 6), math.nan), 1)
    assert verdict(result).failures == ("the embeddings are not all finite",)


def test_a_file_of_another_vocabulary_is_refused() -> None:
    other = Fixed()
    other.vocabulary = 12
    with pytest.raises(InputError, match="a vocabulary of 12, the model one of 11"):
        embeddings.compare_embeddings(Fixed(), {"test": other}, TEXTS, silent)


@pytest.mark.parametrize(
    ("architecture", "given"), [("BertModel", True), ("LlamaModel", True), ("GPT2LMHeadModel", False), ("LlamaForCausalLM", False)]
)
def test_who_gives_embeddings_is_judged_by_them(architecture: str, given: bool) -> None:
    config = SimpleNamespace(architectures=[architecture])
    assert embeddings.given_by(config) is given
    fitting, other = Thresholds(min_cosine=0.9), Thresholds(max_kl=0.1)
    if not given:
        fitting, other = other, fitting
    embeddings.check_thresholds(fitting, config)
    with pytest.raises(InputError, match="does not go with") as refused:
        embeddings.check_thresholds(other, config)
    assert ("--min-cosine" in refused.value.hint) is given


def test_a_window_ends_as_the_tokenizer_ends_a_text() -> None:
    def bert(_: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[101, 102])

    assert embeddings.texts_of([[101, 5, 6, 7], [101, 8, 9, 10]], bert) == [[101, 5, 6, 102], [101, 8, 9, 102]]
    assert embeddings.texts_of([[1, 5, 6]], lambda _: SimpleNamespace(input_ids=[1])) == [[1, 5, 6]]
