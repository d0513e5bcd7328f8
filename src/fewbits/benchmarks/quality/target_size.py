"""llama.cpp's allocation by target size, after its pull request 15550 (open in 2026): a further baseline of `bench plans`.

Every tensor is rounded to every type by ggml itself, a sample of its rows at least, and the error of a type is the squared error of a row
under the importance matrix, as a share of the row's own weighted size, on average (without the outermost 1 % on either side) times the
number of rows. Types that cost more without being better are dropped. Then a price per byte is bisected until the types that are cheapest
at that price fill the budget, and what is left is spent one step at a time, best first. The pull request describes the steps; the numbers
were read in a public copy of its branch, and it may have moved on since.

By its author's choice some tensors count for more: ffn_down 6 times, the output 3 times, a tied embedding up to 2.5 times, values 1.25
times; errors of attention grow at few bits. An importance that stands out is capped. Not rebuilt: what needs statistics of activations that
llama.cpp's importance files of 2026 do not hold, and rules for ffn_down alone (clipped weights below 3 bits, none far below its kind).
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fewbits import formats, planning
from fewbits.benchmarks.peers import ggml
from fewbits.benchmarks.peers.ggml import SPELLED
from fewbits.model.gguf import architectures
from fewbits.store.files import Staged

if TYPE_CHECKING:
    from fewbits.benchmarks.quality.contest import Contest
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan

TYPES = (
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs", "iq4_nl",
    "q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "fp16",
)  # fmt: skip
_SAMPLED, _FEWEST_ROWS, _MOST_ROWS = 1 << 19, 256, 4096  # weights of a tensor that are rounded to each type; rows of them
_TRIMMED = 0.01
_CAP = 4 * 1.4826  # median deviations of the logarithm, about four standard deviations
_FEW_BITS = 2.2  # on average: below, a preference for ffn_down would starve the rest
_HALVINGS = 60
_WEIGHTY = {r"ffn_down": 6.0, r"^output\.weight$": 3.0, r"attn_v": 1.25}


class Candidate(NamedTuple):
    type: str
    nbytes: int
    error: float


def plan_by_target_size(contest: Contest, nbytes: int, why: str) -> Plan:
    """The plan that llama-quantize would make for so many bytes of weights."""
    source, target = contest.source, contest.target
    named, candidates = architectures.tensor_names(source.config), _measured(contest)
    names = [named(weight.parameter) for weight in source.weights]
    elements = [weight.shape[0] * weight.shape[1] for weight in source.weights]
    preferences = preferred(names, elements, nbytes)
    chosen = choose([frontier(candidates[weight.name]) for weight in source.weights], preferences, nbytes)
    types = [(weight, formats.get(picked.type)) for weight, picked in zip(source.weights, chosen, strict=True)]
    return planning.Plan(target.name, tuple(planning.priced(weight, target, fmt, why, "rtn") for weight, fmt in types))


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """By rising bytes and falling error, without those that a mixture of two others beats: the lower convex hull."""
    hull: list[Candidate] = []
    for one in sorted(candidates, key=lambda each: (each.nbytes, each.error)):
        if hull and one.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], one) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(one)
    return hull


def _slope(cheap: Candidate, dear: Candidate) -> float:
    return (dear.error - cheap.error) / (dear.nbytes - cheap.nbytes)


def choose(frontiers: Sequence[Sequence[Candidate]], preferences: Sequence[float], nbytes: int) -> list[Candidate]:
    """One candidate of each tensor, within the bytes: at the lowest price per byte that fits, then the best steps that still do."""
    least = [0] * len(frontiers)
    if _bytes(frontiers, least) >= nbytes:
        return [options[0] for options in frontiers]
    low, high = 0.0, 1.0
    while _bytes(frontiers, _at_price(frontiers, preferences, high)) > nbytes:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _bytes(frontiers, _at_price(frontiers, preferences, middle)) <= nbytes
        low, high = (low, middle) if fits else (middle, high)
    indices = _at_price(frontiers, preferences, high)
    _spend_rest(frontiers, preferences, indices, nbytes)
    return [options[index] for options, index in zip(frontiers, indices, strict=True)]


def _at_price(frontiers: Sequence[Sequence[Candidate]], preferences: Sequence[float], price: float) -> list[int]:
    return [
        min(range(len(options)), key=lambda i, options=options, each=each: options[i].error * each + price * options[i].nbytes)  # type: ignore[misc]
        for options, each in zip(frontiers, preferences, strict=True)
    ]


def _bytes(frontiers: Sequence[Sequence[Candidate]], indices: Sequence[int]) -> int:
    return sum(options[index].nbytes for options, index in zip(frontiers, indices, strict=True))


def _spend_rest(frontiers: Sequence[Sequence[Candidate]], preferences: Sequence[float], indices: list[int], nbytes: int) -> None:
    left = nbytes - _bytes(frontiers, indices)
    steps: list[tuple[float, int]] = []

    def offer(tensor: int) -> None:
        options, index = frontiers[tensor], indices[tensor]
        if index + 1 < len(options):
            heapq.heappush(steps, (_slope(options[index], options[index + 1]) * preferences[tensor], tensor))

    for tensor in range(len(frontiers)):
        offer(tensor)
    while steps:
        _, tensor = heapq.heappop(steps)
        options, index = frontiers[tensor], indices[tensor]
        more = options[index + 1].nbytes - options[index].nbytes
        if more <= left:
            left -= more
            indices[tensor] += 1
            offer(tensor)


def preferred(names: Sequence[str], elements: Sequence[int], nbytes: int) -> list[float]:
    """How much more an error of each tensor counts."""
    total, tied = sum(elements), "output.weight" not in names
    starved = 8 * nbytes / total < _FEW_BITS
    given = []
    for name, count in zip(names, elements, strict=True):
        weight = next((factor for pattern, factor in _WEIGHTY.items() if re.search(pattern, name)), 1.0)
        if starved and "ffn_down" in name:
            weight = 1.0
        if tied and not starved and name == "token_embd.weight":
            weight = max(1.25, 2.5 * (1 - 3 * max(0.0, count / total - 0.1)))
        given.append(weight)
    return given


def _measured(contest: Contest) -> dict[str, list[Candidate]]:
    path, source = contest.folder / "target-size.json", contest.source
    if not path.is_file():
        named, found = architectures.tensor_names(source.config), {}
        for weight in contest.progress(source.weights, len(source.weights), "rounding to all types of llama.cpp"):
            seen = contest.statistics.of(weight.name).input
            importance = None if seen is None else seen.mean_square().numpy()
            w = source.load(weight).float().numpy()
            found[weight.name] = candidates_of(w, importance, weight, named(weight.parameter))
        with Staged(path) as staged:
            staged.write_text(json.dumps(found))
    stored: Mapping[str, list[tuple[str, int, float]]] = json.loads(path.read_text())
    return {name: [Candidate(*each) for each in some] for name, some in stored.items()}


def candidates_of(w: ggml.Floats, importance: ggml.Floats | None, weight: Weight, tensor: str) -> list[Candidate]:
    """The types that its columns allow; those of vectors only where an importance is known."""
    rows, cols = w.shape
    count = min(rows, max(_FEWEST_ROWS, min(_MOST_ROWS, _SAMPLED // cols)))
    sample = w[np.linspace(0, rows - 1, count).round().astype(int)]
    options = []
    for name in TYPES:
        fmt = formats.get(name)
        if (name.startswith("iq") and importance is None) or (not fmt.is_cast and cols % fmt.block):
            continue
        bits = 8 * fmt.nbytes(weight.shape) / (rows * cols)
        harsh = 1 + 0.5 * 2 ** (3 - bits) if re.search(r"attn_[qkvo]", tensor) else 1.0
        options.append(Candidate(name, fmt.nbytes(weight.shape), harsh * rows * relative_error(sample, name, importance)))
    return options


def relative_error(w: ggml.Floats, name: str, importance: ggml.Floats | None) -> float:
    """The mean over rows of (weighted squared error / weighted square of the row), outermost rows left out."""
    if name == "fp16":
        rounded = w.astype(np.float16).astype(np.float32)
    else:
        stored = ggml.quantize(SPELLED[name], w, importance)
        rounded = ggml.dequantize(SPELLED[name], stored.reshape(-1), w.size).reshape(w.shape)
    d = np.ones(w.shape[1]) if importance is None else capped(importance.astype(np.float64))
    errors, sizes = ((rounded.astype(np.float64) - w) ** 2) @ d, (w.astype(np.float64) ** 2) @ d
    shares = np.sort(errors / np.where(sizes > 0, sizes, 1.0))
    cut = int(_TRIMMED * len(shares)) if len(shares) >= 100 else 0
    return float(shares[cut : len(shares) - cut].mean())


def capped(importance: np.ndarray) -> np.ndarray:
    """Without values that stand out by far: they would hide the error of all other columns."""
    positive = importance[importance > 0]
    if len(positive) < max(8, len(importance) // 2):
        return importance
    logs = np.log(positive)
    middle = np.median(logs)
    spread = np.median(np.abs(logs - middle))
    return np.minimum(importance, np.exp(middle + _CAP * spread)) if spread > 0 else importance
