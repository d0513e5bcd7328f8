"""What results.json holds. A run fills these classes and writes them, the page reads them back (page/checked_json.py), without torch.

Plan, Decision, Round and DemoFile are written by the rooms that compute them: listed is what the page reads of them. A mapping to Any is
written by a class whose room imports torch; the page checks what it takes out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fewbits.planning.allocation import Point
from fewbits.targets.running import HowToRun
from fewbits.verification.answers import Answer
from fewbits.verification.forecast.block_errors import Accumulation
from fewbits.verification.metrics import Verdict

NAME = "results.json"
CALIBRATED = "the text that calibrated it"  # `what` of the hash that is there if codes were fitted to a text


@dataclass(frozen=True)
class Source:
    """The model before quantization."""

    name: str
    architecture: str
    elements: int  # in matrices
    float_bytes: int  # of the matrices, as they are in the checkpoint
    float_format: str  # of most of them


@dataclass(frozen=True)
class Hash:
    what: str
    sha256: str
    bytes: int | None = None


@dataclass(frozen=True)
class Reproduction:
    commands: tuple[str, ...] = ()
    hashes: tuple[Hash, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] | None = None  # artifact.machine.Machine
    caveat: str = ""  # who gets the same bytes


@dataclass(frozen=True)
class Option:
    """One format for one weight."""

    format: str
    bytes: int
    kl: float


@dataclass(frozen=True)
class FrontierPoint:
    bytes: int
    bits_per_weight: float
    kl: float
    choice: tuple[int, ...] = ()  # for each weight, which of its options; empty: not known


@dataclass(frozen=True)
class Uniform:
    """One format for all weights, where it fits every one."""

    format: str
    bytes: int
    bits_per_weight: float
    kl: float  # predicted


@dataclass(frozen=True)
class Frontier:
    """The plan at every size: what each weight could be, and which of that it is at each size."""

    weights: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]  # of each weight: those that some point takes
    points: tuple[FrontierPoint, ...]  # by rising size
    uniform: tuple[Uniform, ...]


@dataclass(frozen=True)
class Histogram:
    low: float
    high: float
    counts: tuple[int, ...]  # in bins of equal width


@dataclass(frozen=True)
class Input:
    """What the weight was multiplied with in calibration."""

    values: Histogram
    low: float
    high: float
    chosen: tuple[float, float] | None  # the range that a static scale covers; None: each token or block gets a scale of its own
    how: str
    massive: int  # channels whose largest value is 20 times the median channel's
    channels: int


@dataclass(frozen=True)
class Distribution:
    weight: str
    format: str
    sampled: int  # values in each histogram
    before: Histogram
    after: Histogram  # decoded, in the same bins
    low: float  # of all its values
    high: float
    std: float
    far: float  # share beyond four standard deviations
    clipped: float | None  # share outside the range of its group's codes; None: a cast, which has no codes
    error: float | None  # |after - before| / |before|
    input: Input | None


@dataclass(frozen=True)
class MemoryUse:
    """The bytes that running the model takes at one context length and with one kind of KV cache."""

    context: int
    kv: str
    weights: int
    kv_cache: int
    activations: int
    overhead: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.overhead


@dataclass(frozen=True)
class KernelUse:
    """The kernel that multiplies a format on this machine in `fewbits run`."""

    format: str
    backend: str
    weights: int
    bytes: int


@dataclass(frozen=True)
class Gathered:
    """What a run computes for the report alone. Files of older versions lack some of it."""

    source: Source | None = None
    reproduction: Reproduction = Reproduction()
    frontier_plans: Frontier | None = None
    accumulation: Accumulation | None = None
    distributions: tuple[Distribution, ...] = ()
    memory: tuple[MemoryUse, ...] = ()
    kernels: tuple[KernelUse, ...] = ()
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # such as an expert that no token reached -> of which weights
    left_out: Mapping[str, str] = field(default_factory=dict)  # a field that is empty -> why
    remarks: tuple[str, ...] = ()  # what a reader should know of the source and of how the file was made
    how_to_run: HowToRun | None = None  # the next command
    answers: tuple[Answer, ...] = ()  # of the file and its source, side by side
    for_size: str = ""  # the command for another size, which takes the place of the word `SIZE` in it

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PlannedWeight:
    format: str
    shape: tuple[int, int]
    bytes: int
    kl: float | None = None  # predicted
    granularity: str = ""
    reason: str = ""

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Plan:
    bytes: int  # of the weights
    bits_per_weight: float
    weights: Mapping[str, PlannedWeight]
    predicted_kl: float | None = None  # on the text of calibration
    predicted_kl_by_kind: Mapping[str, float] = field(default_factory=dict)  # where it is judged on other text, or on several kinds

    @property
    def elements(self) -> int:
        return sum(weight.elements for weight in self.weights.values())

    def predicted_for(self, verdict: Verdict | None) -> float | None:
        """The KL on the text of this verdict."""
        return predicted_as_judged(self.predicted_kl, self.predicted_kl_by_kind, verdict)


@dataclass(frozen=True)
class ThresholdPlan:
    """The plan that thresholds give for the same budget."""

    bytes: int
    kl: float | None


def predicted_as_judged(predicted: float | None, by_kind: Mapping[str, float], verdict: Any) -> float | None:
    """The forecast for the text of this verdict: kinds of text count as many tokens as were judged of them."""
    judged = {each.name: each.tokens for each in verdict.domains} if isinstance(verdict, Verdict) else {}
    if judged and judged.keys() <= by_kind.keys():
        return sum(by_kind[name] * tokens for name, tokens in judged.items()) / sum(judged.values())
    return next(iter(by_kind.values())) if len(by_kind) == 1 and not judged else predicted


@dataclass(frozen=True)
class Decision:
    threshold_plan: ThresholdPlan | None = None
    frontier: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Round:
    predicted: float  # KL of the plan
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Results(Gathered):
    """Of `fewbits quantize`."""

    file: str
    plan: Plan
    verdict: Verdict | None = None
    coverage: Mapping[str, Any] | None = None  # calibration.text.coverage.Coverage; None: no text was calibrated with
    outcomes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by weight: which method chose its codes
    decision: Decision = Decision()
    rounds: tuple[Round, ...] = ()

    @property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        if self.frontier_plans is not None:
            return self.frontier_plans.points
        return tuple(FrontierPoint(point.nbytes, point.bits_per_weight, point.kl) for point in self.decision.frontier)


@dataclass(frozen=True)
class DemoFile(Verdict):
    format: str
    target: str
    file: str
    crosscheck: Mapping[str, Any]  # verification.crosscheck.CrossCheck


@dataclass(frozen=True)
class Demonstration:
    """Of `fewbits demo`."""

    model: str
    rows: tuple[DemoFile, ...]
    skipped: tuple[str, ...]
    detail: Results | None = None  # about one of the files
