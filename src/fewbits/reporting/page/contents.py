"""What the page knows, as plain values: the contents of one results.json and of the benchmarks given with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CALIBRATED = "the text that calibrated it"  # among the hashes: what codes were fitted to
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Weight:
    name: str
    rows: int
    cols: int
    format: str
    method: str
    granularity: str
    reason: str
    bytes: int
    kl: float | None  # predicted

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Verdict:
    tokens: int
    kl: float
    kl_low: float
    kl_high: float
    kl_p99: float
    kl_max: float
    kl_floor: float | None
    ppl: float
    ppl_base: float
    ppl_ratio: float
    ppl_ratio_low: float
    ppl_ratio_high: float
    agreement: float
    max_logit_diff: float
    bytes: int
    bits_per_weight: float
    runtime: str
    runtime_version: str
    limits: Mapping[str, float]
    failures: tuple[str, ...]
    passed: bool


@dataclass(frozen=True)
class Choice:
    format: str
    bytes: int
    kl: float | None


@dataclass(frozen=True)
class Point:
    bytes: int
    bits_per_weight: float
    kl: float
    choices: tuple[Choice, ...] = ()  # in the order of the plan's weights; empty: it is not known which


@dataclass(frozen=True)
class Mark:
    """A point that something else than the frontier gives."""

    name: str
    bits_per_weight: float
    kl: float
    bytes: int | None = None


@dataclass(frozen=True)
class Block:
    name: str
    predicted: float | None  # so far
    measured: float
    hidden_error: float


@dataclass(frozen=True)
class Histogram:
    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Input:
    values: Histogram
    low: float
    high: float
    chosen: tuple[float, float] | None
    how: str
    massive: int
    channels: int


@dataclass(frozen=True)
class Distribution:
    weight: str
    format: str
    sampled: int
    before: Histogram
    after: Histogram
    low: float
    high: float
    std: float
    far: float
    clipped: float | None
    error: float | None
    input: Input | None


@dataclass(frozen=True)
class Use:
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
class Kernel:
    format: str
    backend: str
    weights: int
    bytes: int


@dataclass(frozen=True)
class Source:
    name: str
    architecture: str
    elements: int
    float_bytes: int
    float_format: str


@dataclass(frozen=True)
class Hash:
    what: str
    sha256: str
    bytes: int | None


@dataclass(frozen=True)
class Made:
    """One file and all that is known of it."""

    file: str
    target: str
    weights: tuple[Weight, ...]
    bytes: int  # of the weights
    bits_per_weight: float
    kl: float | None  # predicted
    kv: str | None
    verdict: Verdict | None
    coverage: Row | None
    methods: Mapping[str, int]  # by what codes were chosen -> weights
    frontier: tuple[Point, ...]
    uniform: tuple[Mark, ...]  # one format for all, predicted
    threshold: Mark | None
    rounds: tuple[tuple[float, Verdict], ...]  # predicted KL, measured
    blocks: tuple[Block, ...]
    block_tokens: int
    distributions: tuple[Distribution, ...]
    memory: tuple[Use, ...]
    kernels: tuple[Kernel, ...]
    source: Source | None
    commands: tuple[str, ...]
    hashes: tuple[Hash, ...]
    versions: Mapping[str, str]
    machine: Mapping[str, str]  # that the bytes may depend on
    caveat: str  # who gets the same bytes
    notes: Mapping[str, tuple[str, ...]]  # what a person should know of weights -> which
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class File:
    """One row of a demonstration."""

    format: str
    target: str
    file: str
    verdict: Verdict
    agrees: bool
    crosscheck_kl: float


@dataclass(frozen=True)
class Results:
    made: Made | None
    files: tuple[File, ...] = ()
    demo: str | None = None  # the model of a demonstration
    skipped: tuple[str, ...] = ()
    peers: tuple[Mark, ...] = ()  # measured on the same model, by `fewbits bench plans`
    bench: Row | None = None  # of kernels
