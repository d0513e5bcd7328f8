"""PyTorch itself: the reference. Float32, every weight decoded; inputs of matmuls and the KV cache rounded where the plan says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import activations as rounding
from fewbits import kv as caches
from fewbits.errors import InputError
from fewbits.files import sha256_of
from fewbits.manifest import NAME
from fewbits.runtimes import Runtime, Session

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.activations import Activation
    from fewbits.artifact import Artifact
    from fewbits.kept import Kept
    from fewbits.model import Model, Weight
    from fewbits.planning import Plan


class _Module(Session):
    """Hooks live as long as a call, so that sessions with and without them can share one module."""

    def __init__(self, module: Any, activations: Mapping[str, Activation], kv: str | None) -> None:
        self._module = module.float().eval()
        self.vocabulary = int(module.config.vocab_size)
        self._kv = None if kv is None else caches.get(kv)
        if self._kv and (why_not := caches.unsupported(module.config)):
            raise InputError(f"the KV cache cannot be {self._kv.name}: {why_not}", "leave `--kv` out")
        submodules, parameters = dict(module.named_modules()), dict(module.named_parameters())
        self._stacks: dict[str, Tensor] = {}
        for name, activation in activations.items():
            stack, _, expert = name.rpartition(".")
            if name not in submodules and stack in parameters and expert.isdigit() and int(expert) < len(parameters[stack]):
                self._stacks[stack] = parameters[stack]
            elif name not in submodules:
                raise InputError(f"the model has no module `{name}` to round the input of", "is it the plan of another model?")
            if activation.static:
                rounding.static_scale(activation)  # one that is not calibrated yet is refused here, not at the first token
        self._activations = activations
        self._rounded = {name: submodules[name] for name in activations if name in submodules}

    def logits(self, tokens: list[int]) -> Tensor:
        import torch

        with (
            torch.inference_mode(),
            _expert_by_expert(self._module) if self._stacks else nullcontext(),
            rounding_inputs(self._activations, self._rounded, self._stacks),
        ):
            if self._kv is None:
                return self._run(tokens)
            from fewbits.kv_cache import QuantizedCache

            cache = QuantizedCache(self._kv)
            return torch.cat([self._run(piece, past_key_values=cache) for piece in self._kv.pieces(tokens)])

    def embeddings(self, tokens: list[int]) -> Tensor:
        """Of a module without a head: the hidden states are then the first thing that it gives."""
        return self.logits(tokens)

    def _run(self, tokens: list[int], **cache: Any) -> Tensor:
        import torch

        out = self._module(input_ids=torch.tensor([tokens]), use_cache=bool(cache), return_dict=False, **cache)
        logits: Tensor = out[0][0].float()
        return logits


@contextmanager
def rounding_inputs(activations: Mapping[str, Activation], modules: Mapping[str, Any], stacks: Mapping[str, Tensor]) -> Iterator[None]:
    """While inside, what these modules and the experts in these stacks read is rounded first."""
    from fewbits.stacks import Products

    def of_expert(stack: str, expert: int, x: Tensor) -> Tensor:
        activation = activations.get(f"{stack}.{expert}")
        return x if activation is None else rounding.quantized(x, activation)

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(_rounding_hook(activations[name])))
        if stacks:
            hooks.enter_context(Products(stacks, change=of_expert))
        yield


def _rounding_hook(activation: Activation) -> Any:
    def rounded(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not hasattr(module, "kernel_size"):
            return rounding.quantized(inputs[0], activation), *inputs[1:]
        channels = inputs[0].dim() - len(module.kernel_size) - 1  # of a convolution: a place's channels share a scale, as a token's do
        return rounding.quantized(inputs[0].movedim(channels, -1), activation).movedim(-1, channels), *inputs[1:]

    return rounded


@contextmanager
def _expert_by_expert(module: Any) -> Iterator[None]:
    """transformers may multiply all experts in one fused call, which leaves no input of one expert to round."""
    before = module.get_experts_implementation()
    module.set_experts_implementation("eager")
    try:
        yield
    finally:
        module.set_experts_implementation(before)


def of_module(module: Any, activations: Mapping[str, Activation] | None = None, kv: str | None = None) -> Session:
    """A session over a transformers module that is loaded already. `activations` by the path of the module that reads them."""
    return _Module(module, activations or {}, kv)


def of_artifact(artifact: Artifact) -> Session:
    """Many windows are run block by block, single ones by the whole module."""
    from fewbits.streamed import StreamedSession

    activations = readers(artifact.plan, artifact.weights)

    def whole() -> Session:
        return of_module(artifact.module(), activations, artifact.plan.kv)

    # a cache is filled token by token, through all blocks
    return whole() if artifact.plan.kv is not None else StreamedSession(Decoded(artifact), whole, activations)


def of_model(model: Model, kept: Kept | None = None) -> Session:
    """The float model, which others are judged beside: it is run once for all of them where there is a place to keep what it gives."""
    from fewbits.streamed import StreamedSession

    return StreamedSession(model, lambda: of_module(model.module()), kept=kept)


@dataclass(frozen=True)
class Decoded:
    """An artifact read as a checkpoint is."""

    artifact: Artifact

    @property
    def config(self) -> Any:
        return self.artifact.config

    @property
    def weights(self) -> Sequence[Weight]:
        return self.artifact.weights

    @property
    def rest(self) -> Sequence[str]:
        return self.artifact.rest

    @property
    def fingerprint(self) -> str:
        return sha256_of(self.artifact.path / NAME)

    def load(self, weight: Weight) -> Tensor:
        return self.artifact.decoded(weight)

    def tensor(self, name: str) -> Tensor:
        return self.artifact.tensor(name)


def readers(plan: Plan, weights: Any) -> dict[str, Activation]:
    """The plan's activations by the module that multiplies: for an embedding that is the output tied to it."""
    found: dict[str, Activation] = {}
    for weight in weights:
        if activation := plan[weight.name].activation:
            names = [weight.tied_to] if weight.kind == "embedding" else [weight.name, weight.tied_to]
            found |= {name: activation for name in names if name}
    return found


class Torch(Runtime):
    name = "torch"
    extra = ""

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        from importlib.metadata import version

        return f"torch {version('torch')}"

    def takes(self, path: Path) -> bool:
        return (path / "fewbits.json").is_file()

    def open(self, path: Path, context: int) -> Session:
        from fewbits.artifact import Artifact

        return of_artifact(Artifact(path))


RUNTIME = Torch()
