"""PyTorch: the reference. Weights are decoded to float32; inputs of matmuls and the KV cache are rounded where the plan says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fewbits.artifact.manifest import NAME
from fewbits.errors import InputError
from fewbits.formats.runtime import activations as activation_formats
from fewbits.formats.runtime import kv as caches
from fewbits.inference.rounded_inputs import rounding_inputs
from fewbits.verification.runtimes import Runtime
from fewbits.verification.session import Session

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.store.cache import Cache


class _Module(Session):
    """Rounding hooks exist during a call only, so that sessions with and without them can share one module."""

    def __init__(self, module: Any, activations: Mapping[str, Activation], kv: str | None) -> None:
        self._module = module.float().eval()
        self.vocabulary = int(caches.text_config(module.config).vocab_size)
        self._kv = None if kv is None else caches.get(kv)
        if self._kv and (why_not := caches.unsupported(module.config)):
            raise InputError(f"the KV cache cannot be {self._kv.name}: {why_not}", "leave `--kv` out")
        submodules, parameters = dict(module.named_modules()), dict(module.named_parameters())
        self._experts: dict[str, Tensor] = {}
        for name, activation in activations.items():
            parameter, _, expert = name.rpartition(".")
            if name not in submodules and parameter in parameters and expert.isdigit() and int(expert) < len(parameters[parameter]):
                self._experts[parameter] = parameters[parameter]
            elif name not in submodules:
                raise InputError(f"the model has no module `{name}` to round the input of", "is it the plan of another model?")
            if activation.static:
                activation_formats.static_scale(activation)  # refuses one that is not calibrated, before the first token
        self._activations = activations
        self._rounded = {name: submodules[name] for name in activations if name in submodules}

    def logits(self, tokens: list[int]) -> Tensor:
        import torch

        with (
            torch.inference_mode(),
            _expert_by_expert(self._module) if self._experts else nullcontext(),
            rounding_inputs(self._activations, self._rounded, self._experts),
        ):
            if self._kv is None:
                return self._run(tokens)
            from fewbits.inference.emulated_kv_cache import EmulatedKVCache

            cache = EmulatedKVCache(self._kv)
            return torch.cat([self._run(piece, past_key_values=cache) for piece in self._kv.pieces(tokens)])

    def following(self, tokens: list[int], count: int) -> Iterator[int]:
        plain = self._kv is None and not self._activations
        return greedy(self._module, tokens, count) if plain else super().following(tokens, count)

    def embeddings(self, tokens: list[int]) -> Tensor:
        """Of a module without a head, whose first output is the hidden states."""
        return self.logits(tokens)

    def _run(self, tokens: list[int], **cache: Any) -> Tensor:
        import torch

        out = self._module(input_ids=torch.tensor([tokens]), use_cache=bool(cache), return_dict=False, **cache)
        logits: Tensor = out[0][0].float()
        return logits


def greedy(module: Any, tokens: list[int], count: int) -> Iterator[int]:
    """The likeliest token each time. Not by transformers' `generate`, which would obey the folder's generation config."""
    import torch

    sequence, new, cache = list(tokens), list(tokens), None
    for _ in range(count):
        with torch.inference_mode():
            out = module(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
        sequence.append(int(out.logits[0, -1].argmax()))
        yield sequence[-1]
        cache = getattr(out, "past_key_values", None)
        new = sequence if cache is None else sequence[-1:]  # a model with a cache of another kind reads it all again


@contextmanager
def _expert_by_expert(module: Any) -> Iterator[None]:
    """transformers may multiply all experts in one fused call, in which the input of a single expert cannot be rounded."""
    before = module.get_experts_implementation()
    module.set_experts_implementation("eager")
    try:
        yield
    finally:
        module.set_experts_implementation(before)


def of_module(module: Any, activations: Mapping[str, Activation] | None = None, kv: str | None = None) -> Session:
    """A session over a loaded transformers module. `activations`: by the name of the module that reads them."""
    return _Module(module, activations or {}, kv)


def of_artifact(artifact: Artifact) -> Session:
    """Runs many windows block by block, a single one by the whole module."""
    from fewbits.verification.streamed import StreamedSession

    activations = readers(artifact.plan, artifact.weights)

    def whole() -> Session:
        return of_module(artifact.module(), activations, artifact.plan.kv)

    if artifact.plan.kv is not None:  # a quantized cache is filled a few tokens at a time, through all blocks
        return whole()
    loads = {"load": artifact.decoded, "tensor": artifact.tensor}  # each weight is decoded when it is loaded
    decoded: Any = SimpleNamespace(config=artifact.config, weights=artifact.weights, rest=artifact.rest, **loads)
    return StreamedSession(decoded, whole, activations)


def of_model(model: Model, cache: Cache | None = None) -> Session:
    """The float model, which files are judged beside. With a `cache`, its hidden states are computed once for all files and runs."""
    from fewbits.verification.streamed import StreamedSession

    return StreamedSession(model, lambda: of_module(model.module()), cache=cache)


def readers(plan: Plan, weights: Any) -> dict[str, Activation]:
    """The plan's activations by the module that multiplies; for an embedding this is the output tied to it."""
    activations: dict[str, Activation] = {}
    for weight in weights:
        if activation := plan[weight.name].activation:
            names = [weight.tied_to] if weight.kind == "embedding" else [weight.name, weight.tied_to]
            activations |= {name: activation for name in names if name}
    return activations


class Torch(Runtime):
    name = "torch"
    extra = ""

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        from importlib.metadata import version

        return f"torch {version('torch')}"

    def takes(self, path: Path) -> bool:
        return (path / NAME).is_file()

    def open(self, path: Path, context: int) -> Session:
        from fewbits.artifact import Artifact

        return of_artifact(Artifact(path).expect_modules())


RUNTIME = Torch()
