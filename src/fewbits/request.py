"""What `quantize` was asked for, as one value. What can be refused is refused when it is made, or when it meets its model; not later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import calibration, methods, planning
from fewbits.artifact import preparation
from fewbits.calibration.text.domains import Mix, in_tokens, mixed
from fewbits.devices.units import bytes_of, parse_duration, parse_tokens
from fewbits.errors import InputError
from fewbits.formats import all as all_formats
from fewbits.formats import get as format_named
from fewbits.formats import names_of
from fewbits.formats.runtime import activations as activation_formats
from fewbits.model import placement
from fewbits.model.gguf.model import GgufModel
from fewbits.planning import decision, recipes, rounded_inputs, rounds, speed, uninformed
from fewbits.planning.accuracy import Thresholds
from fewbits.planning.constraints import Constraints, listed
from fewbits.planning.decision import Budget
from fewbits.store import executors
from fewbits.store.files import Staged
from fewbits.store.untrusted import read_text
from fewbits.targets import pricing
from fewbits.targets.export import check_target, output_path, split_bytes, target_for
from fewbits.targets.gguf.source import MAX_FLOOR, Like, layout_for
from fewbits.verification import embeddings
from fewbits.verification.answers import COUNT
from fewbits.verification.files import TOKENS

if TYPE_CHECKING:
    from fewbits.calibration import Paths
    from fewbits.formats import Format
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.preflight.within import Settings
    from fewbits.progress import Progress
    from fewbits.store.executors import Chosen
    from fewbits.targets import Target

USUAL_STEPS = 100  # of tuning, where it is the default: half as many lose an eighth of the gain (embedded model, 4.8 bits)
_BUDGETS = "`--size 4.5bpw`, `--fits 8GB`, `--max-kl 0.01`, `--format NAME` for one format for all, or `--plan FILE`"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `fewbits quantize`, under the names that the command line gives them."""

    model: str | Path
    out: str | Path
    to: str | None = None  # the target; None: it follows from the name of `out`
    split_size: str | int | None = None  # of tensors in each of several GGUF files: bytes, or `2GB`
    like: str | Path | None = None  # a float GGUF of the same model, which says how llama.cpp lays it out
    converter: str | None = None  # llama.cpp's converter, which makes one: a folder, a script, or `pip`
    accept_unmatched: bool = False  # matrices of it that are not in the checkpoint are carried over in float, however many
    max_floor: float = MAX_FLOOR  # KL of the float file in llama.cpp to the float model, above which nothing is begun

    format: str | None = None  # one format for all weights
    plan: str | Path | None = None  # a plan.json
    size: str | None = None
    fits: str | None = None  # a device
    context: int | None = None  # tokens, on that device; `8k` too, as the command line takes it
    max_kl: float | None = None  # these four: a budget where no other is given, and what the file is judged by
    min_agreement: float | None = None
    max_ppl_ratio: float | None = None
    min_cosine: float | None = None
    rounds: int = rounds.ROUNDS  # plans to try at most, until an accuracy is met

    override: str | Sequence[str] = ()
    formats: str | Sequence[str] = ()
    together: str | Sequence[str] = ()
    min_speed: float | None = None
    bandwidth: float = speed.BANDWIDTH  # bytes per second, or `30GB/s`
    strategy: str = "solve"
    kv: str | None = None
    activations: str = "none"
    activations_kl: float | None = None  # that rounding inputs is predicted to cost at most, beyond which some stay as they are

    data: Paths = ()  # text to calibrate with; none given: the embedded text
    held_out: Paths = ()  # text to judge on; none given: a part of `data` that calibration does not see, or the embedded text
    stats: str | Path | None = None  # statistics that `calibrate` wrote, or llama.cpp's importance matrix
    requantize: bool = False  # the model may be a GGUF that is quantized already
    imatrix: str | Path | None = None  # llama.cpp's importance matrix, in the place of statistics
    samples: int = calibration.SAMPLES
    weights: str | Mapping[str, float] | None = None  # how much each kind of text counts, `prose=1,code=2`; None: as there is text of it
    length: int | str | Mapping[str, int] | None = None  # tokens in a sample, of one kind of text too: `books=4096`
    seed: int = 0
    shards: int = 1  # parts of the text that are calibrated apart

    method: str = "auto"
    rewrite: str | None = None  # None: SmoothQuant where inputs are rounded to int8 and text is calibrated with, else none
    sequential: bool = False
    tune: int | None = None  # None: as many steps as pay, which depends on the budget

    tokens: int = TOKENS  # to judge on
    answers: int = COUNT  # of the file and of its source, side by side on the page; 0: none
    no_verify: bool = False
    memory: int = calibration.MEMORY  # bytes, or `1GB`
    device: str = placement.AUTO  # where the float model runs: cpu, cuda, cuda:1, mps, xpu; auto: a GPU where there is one
    within: str | float | None = None  # seconds, or `2h`: what there is no time for is left out
    began: float | None = None  # of that time, by `time.monotonic()`; None: when this is asked for
    executor: str = executors.AUTO  # who measures and quantizes the weights, with the same bytes
    store: str | None = None
    fresh: bool = False  # without what an earlier run left
    offline: bool = False

    def __post_init__(self) -> None:
        self._read("memory", lambda given: bytes_of(given, "--memory"))
        self._read("context", parse_tokens)
        self._read("bandwidth", speed.parse_bandwidth)
        self._read("within", parse_duration)
        _ = self.workers, self.passes_on, self.path, self.budget, self.constraints, self.mix, self.usual_length  # each refuses a wrong one
        fixed = [given for given in (self.format, self.plan, self.size, self.fits) if given is not None]
        if len(fixed) > 1 or not (fixed or self.budget.given):
            raise InputError("give one budget", _BUDGETS)
        if self.imatrix is not None and self.stats is not None:
            raise InputError("`--imatrix` and `--stats` are two kinds of statistics", "give one of them")
        if self.weights and self.statistics is not None:
            hint = "give `--weights` to `fewbits calibrate`"
            raise InputError("`--weights` weighs the text that is calibrated with, and here are statistics of some already", hint)
        if self.within is not None and not self.workers.in_process:
            raise InputError("`--within` times this process, and `--executor` hands the work to others", "leave one of them out")
        if self.activations_kl is not None and self.activations == "none":
            raise InputError("`--activations-kl` goes with `--activations`", "leave it out")
        if not self.has_budget:
            self._check_nothing_ignored()

    def _read(self, name: str, number_of: Callable[[str], float]) -> None:
        """A number may be given as the text that the command line takes."""
        if isinstance(given := getattr(self, name), str):
            object.__setattr__(self, name, number_of(given))

    @cached_property
    def workers(self) -> Chosen:
        return executors.parse(self.executor, self.store, {"--sequential": self.sequential, "--tune": self.tune})

    @property
    def passes_on(self) -> str:
        """The device of passes: with an executor it is not the one that `auto` would find."""
        return placement.for_executor(self.device, self.workers.in_process)

    @cached_property
    def target(self) -> Target:
        return target_for(Path(self.out), self.to, split_bytes(self.split_size))

    @cached_property
    def path(self) -> Path:
        """The file or folder that is written."""
        return output_path(Path(self.out), self.target)

    @property
    def work(self) -> Path:
        """Where everything is kept that the next run can go on from."""
        return self.path.with_name(f"{self.path.name}.work")

    @cached_property
    def limits(self) -> Thresholds:
        return Thresholds(self.max_kl, self.min_agreement, self.max_ppl_ratio, self.min_cosine)

    @cached_property
    def budget(self) -> Budget:
        return Budget(self.size, self.fits, self.context, self.limits)

    @cached_property
    def constraints(self) -> Constraints:
        return Constraints(
            names_of(self.formats), listed(self.override), listed(self.together), self.strategy, self.kv, self.min_speed, self.bandwidth
        )

    @cached_property
    def mix(self) -> Mix:
        return mixed(self.weights, self.length)[0]

    @cached_property
    def usual_length(self) -> int | None:
        """Of a sample, where its kind of text has none of its own."""
        return in_tokens(mixed(self.weights, self.length)[1])

    @property
    def statistics(self) -> Path | None:
        """What is there already: a folder of `calibrate`, or an importance matrix; None: text is calibrated with, where it is needed."""
        given = self.stats if self.imatrix is None else self.imatrix
        return None if given is None else Path(given)

    @property
    def has_budget(self) -> bool:
        """The plan is to be found; otherwise a format or a plan.json says it."""
        return self.format is None and self.plan is None

    def check(self, source: Model) -> None:
        """What only the model can tell."""
        embeddings.check_thresholds(self.limits, source.config)
        if self.path.exists() and self.path.samefile(source.path):
            raise InputError(f"`{self.path}` is the model itself", "choose another `-o`")
        if source.lossy and not self.requantize:
            raise InputError(
                f"`{source.name}` is quantized already ({source.lossy}): it cannot stand for the float model",
                "give the float model (its folder, its hub id, or a GGUF in F16 or BF16); or `--requantize`, to round this file once more",
            )
        if self.imatrix is not None and not Path(self.imatrix).is_file():
            raise InputError(f"there is no file `{self.imatrix}`", "`--imatrix` takes a file of llama-imatrix, .gguf or .dat")
        if self.target.name != "gguf" and not isinstance(source, GgufModel):
            check_target(self.target, source.path, source.config, source.tokenizer)
        Staged(self.path, self.target.marker).check()

    def laid_out(self, source: Model, progress: Progress[Any]) -> Model:
        """The model whose weights are planned and written: the source itself, or the source as llama.cpp lays it out."""
        how = Like(self.like, self.converter, self.accept_unmatched, self.max_floor)
        subject = layout_for(source, self.target, how, self.work, progress)
        if subject.layout:
            self._check_as_laid_out(subject)
        asked = self.without_importance(subject)
        if asked.has_budget:
            asked._check_plannable(subject)
        return subject

    def without_importance(self, subject: Model) -> Request:
        """The same request, unless nothing is known of the model but its weights: then for rounding, in formats that stand it."""
        if not self.without_gradients(subject) or self.imatrix is not None or self.method.lower() != "auto":
            return self
        if not self.has_budget:
            uninformed.check_plan(make_plan(subject, self))
            return replace(self, method="rtn")
        uninformed.check_choice(self.size, self.constraints, subject.weights, subject.config)
        return replace(self, method="rtn", formats=self.formats or uninformed.names_left(self.target.candidates))

    def without_gradients(self, source: Model) -> bool:
        """Nothing runs the source block by block, so that nothing is known of its gradients."""
        return isinstance(source, GgufModel) and source.origin is None

    def with_tuning(self, subject: Model, plan: Plan | None) -> Request:
        """The same request with the number of tuning steps decided: tuning pays where few bits are left, and needs the calibration text."""
        if self.tune is not None:
            return self
        mixture = any(weight.expert is not None for weight in subject.weights)  # too large to hold a block of it with gradients
        possible = not (subject.layout or mixture) and self.statistics is None and self.workers.in_process and self.calibrates(plan)
        plain = self.method.lower() != "rtn" and self.rewrite in (None, "none") and self.activations == "none"
        pays = (
            pricing.means_few_bits(subject, self.target, self.budget, self.constraints)
            if plan is None
            else pricing.has_few_bits(subject, plan)
        )
        return replace(self, tune=USUAL_STEPS if possible and plain and pays else 0)

    def spending(self, settings: Settings) -> Request:
        """The same request with less of everything that takes time."""
        formats = tuple(fmt.name for fmt in settings.formats) if self.has_budget else self.formats
        samples = settings.samples if self.statistics is None else self.samples
        return replace(self, samples=samples, formats=formats, tune=settings.tune, tokens=settings.tokens)

    @property
    def activations_limit(self) -> float:
        """A plan.json says itself how inputs are read. Inputs of 4 bits are asked for in the knowledge of what they cost."""
        if self.activations_kl is not None:
            return self.activations_kl
        rounded = activation_formats.parse(self.activations)
        return rounded_inputs.LIMIT if rounded and rounded.format == "int8" else math.inf

    def fixed_plan(self, source: Model) -> Plan | None:
        """The plan that a format or a plan.json says; None: there is a budget to spend."""
        if self.has_budget:
            return None
        plan = make_plan(source, self)
        for name in {entry.method for entry in plan.entries}:
            methods.get(name)
        return plan

    def calibrates(self, plan: Plan | None) -> bool:
        return plan is None or preparation.needs_calibration(plan, self.rewrite)

    def _check_nothing_ignored(self) -> None:
        """What only a budget leaves to choose, and what a plan.json says itself, is refused rather than left out in silence."""
        chosen = {"--formats": self.constraints.formats, "--together": self.constraints.together, "--min-speed": self.min_speed is not None}
        chosen["--strategy"] = self.strategy != "solve"
        if name := next((name for name, given in chosen.items() if given), None):
            raise InputError(f"`{name}` goes with a budget", "give `--size`, `--fits` or an accuracy instead of a format or a plan")
        said = {"--kv": self.kv is not None, "--activations": self.activations != "none"}
        if self.plan is not None and (name := next((name for name, given in said.items() if given), None)):
            raise InputError(f"`{name}` does not go with `--plan`", "the plan says it itself: edit plan.json instead")

    def _check_as_laid_out(self, subject: Model) -> None:
        """What works on the modules of a checkpoint is refused for matrices that are laid out for llama.cpp."""
        asked = {"--sequential": self.sequential, "--tune": self.tune, "--rewrite": self.rewrite not in (None, "none")}
        asked |= {"--activations": self.activations != "none", "--kv": self.kv is not None, "--executor": not self.workers.in_process}
        if name := next((name for name, given in asked.items() if given), None):
            raise InputError(f"`{name}` does not go with a layout that is not fewbits' own", "leave it out")
        if self.without_gradients(subject):
            if self.data or self.stats is not None:
                name = "--data" if self.data else "--stats"
                hint = "give `--imatrix FILE` of llama.cpp, or the model's folder `--like` this file; `--held-out` takes text to judge on"
                raise InputError(f"`{name}` is for calibrating, and nothing here runs a `{subject.config.model_type}` block by block", hint)
            if self.has_budget and self.budget.by_accuracy:
                raise InputError("an accuracy needs gradients, and nothing here runs this model block by block", "give a size, or a format")
            if self.method.lower() == "gptq":
                raise InputError("gptq needs second moments of the inputs", "leave `--method` out")

    def _check_plannable(self, source: Model) -> None:
        methods.get(self.method)
        self.constraints.rules_for(source.weights)
        if self.rewrite not in (None, "none"):
            raise InputError("`--rewrite` goes with `--format`", "a budget chooses formats for the weights as they are")
        if self.activations != "none":
            raise InputError("`--activations` goes with `--format`", "or make a plan first and edit it")
        if embeddings.given_by(source.config) and not self.without_gradients(source):
            raise InputError(
                "a budget needs a language model: plans are found by their effect on logits, and an encoder has none",
                "use `--format` or `--plan`",
            )
        if self.no_verify and self.budget.by_accuracy:
            raise InputError("an accuracy cannot be met without measuring it", "leave `--no-verify` out, or give a size")
        if self.kv == "auto":
            raise InputError("`--kv auto` needs measured caches", "use `fewbits measure --kv int8,int4`, then `fewbits plan --kv auto`")
        decision.says_cache(self.target, self.budget, self.kv)
        pricing.check_reachable(source, self.target, self.budget, self.constraints)
        if self.budget.by_accuracy:
            decision.predicted_kl(self.limits)


def _format_named(name: str) -> Format:
    try:
        return format_named(name)
    except InputError:
        if name.lower() not in recipes.known():
            raise
        mix = name.lower()
        main = next((plain for plain in (mix, mix.rpartition("_")[0]) if plain in all_formats()), None)
        one = f"; `--format {main}` gives all weights that type" if main else ""
        raise InputError(
            f"`{name}` is a mix of several types of llama.cpp, not one format", f"`--size {mix}` makes the best file of its bytes{one}"
        ) from None


def make_plan(source: Model, request: Request) -> Plan:
    """One format for all, or a plan.json."""
    if request.format is not None:
        activation = activation_formats.parse(request.activations)
        wanted, method = _format_named(request.format), request.method.lower()
        return planning.uniform(source.weights, request.target, wanted, request.constraints.overrides, method, activation, request.kv)
    if request.constraints.overrides:
        raise InputError("`--override` goes with `--format`", "edit plan.json instead")
    text = read_text(Path(str(request.plan)), "`fewbits quantize` writes a plan.json into its artifact")
    return planning.read(text, source.weights, request.target)
