"""The whole way in one object: open, quantize, generate, compare with the float model, export. Each method calls one or two verbs.

bench = fewbits.Workbench("out/model.fewbits", model="MODEL")
bench.quantize(data="text.txt", size="4.5bpw")
bench.generate("Once upon a time")
bench.benchmark(["The capital of France is"], [" Paris"]).accuracy
bench.export("out/model.gguf")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import model as models
from fewbits import pipeline
from fewbits.artifact import Artifact
from fewbits.errors import InputError, naming_arguments
from fewbits.inspection import sizes
from fewbits.planning import accuracy
from fewbits.reporting.meanwhile import on_terminal, shown_by
from fewbits.targets import export
from fewbits.verification import metrics

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration import Paths
    from fewbits.model import Model
    from fewbits.progress import Progress
    from fewbits.reporting.results.quantized import Quantized
    from fewbits.verification.metrics import Verdict

Text = str | Sequence[int]  # a text, or its tokens


@dataclass(frozen=True)
class Accuracy:
    """Over the tokens of the targets, each predicted from its input and the tokens of the target before it."""

    accuracy: float  # share of target tokens that the packed model finds the most likely
    accuracy_base: float  # the same of the float model
    verdict: Verdict  # how far the two models are from each other there, and the perplexity of the targets


class Workbench:
    """An artifact folder and the float model that it is made of. Generating and exporting need only the folder; quantizing and comparing
    need the model too."""

    def __init__(
        self,
        folder: str | Path,
        model: str | Path | None = None,
        plan: str | Path | None = None,
        *,
        exact: bool = False,
        progress: Progress[Any] = on_terminal,
    ) -> None:
        """`plan`: a plan.json, in the place of a budget. `exact`: inputs of matrix products are not rounded to int8. `progress`: tqdm,
        False, or a function."""
        place = Path(folder)
        is_made = (place / "fewbits.json").is_file()
        self.folder = place if is_made else export.output_path(place, export.target_for(place, "fewbits"))
        self.exact, self._model, self._plan, self._progress = exact, model, plan, shown_by(progress)

    @cached_property
    def source(self) -> Model:
        if self._model is None:
            raise InputError("there is no float model to do this with", "name it: `Workbench(FOLDER, model=MODEL)`")
        return models.open(self._model)

    @cached_property
    def artifact(self) -> Artifact:
        return Artifact(self.folder)

    @cached_property
    def module(self) -> Any:
        """The transformers module over packed weights, as `from_pretrained` loads it."""
        from transformers import AutoModelForCausalLM

        from fewbits.inference.packed_weights import packed_weights

        loaded = AutoModelForCausalLM.from_pretrained(self.artifact.path)
        for matrix in packed_weights(loaded):
            matrix.exact = self.exact
        return loaded

    @naming_arguments()
    def quantize(self, data: Paths = (), **options: Any) -> Quantized:
        """As `fewbits.quantize`: calibrated with `data`, to a budget (`size=`, `fits=`, `max_kl=`, `format=`) or to the bench's plan."""
        if self._plan is not None:
            options = {"plan": self._plan} | options
        made = pipeline.quantize(self.source.path, self.folder, to="fewbits", data=data, progress=self._progress, **options)
        for stale in ("artifact", "module"):
            self.__dict__.pop(stale, None)
        return made

    def generate(self, prompt: str, tokens: int = 64, **options: Any) -> str:
        """The text that follows the prompt, by the most likely token each time. `options` are those of transformers' `generate`."""
        tokenizer = self.artifact.tokenizer
        given = tokenizer(prompt, return_tensors="pt")
        out = self.module.generate(**given, max_new_tokens=tokens, **{"do_sample": False} | options)
        return str(tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True))

    def benchmark(self, inputs: Sequence[Text], targets: Sequence[Text]) -> Accuracy:
        """How well the packed and the float model predict each target after its input, and how far they are from each other."""
        import torch

        if len(inputs) != len(targets) or not inputs:
            raise InputError(f"{len(inputs)} inputs do not go with {len(targets)} targets", "give one target for every input")
        floats, measured = self.source.module(), metrics.MeasuredLogits()
        hits, hits_base = [], []
        for one, target in self._progress(list(zip(inputs, targets, strict=True)), len(inputs), "comparing"):
            before, wanted = self._tokens(one, start=True), self._tokens(target)
            if not before or not wanted:
                raise InputError(f"`{target if before else one}` is no text to compare on", "an input and its target have a token at least")
            following = torch.tensor(wanted)
            base, test = (_logits(module, before + wanted)[len(before) - 1 : -1] for module in (floats, self.module))
            measured.add(base, test, following)
            hits += (test.argmax(-1) == following).tolist()
            hits_base += (base.argmax(-1) == following).tolist()
        verdict = metrics.judge(
            measured,
            accuracy.Thresholds(),
            nbytes=sizes.size_of(self.artifact.path),
            bits_per_weight=self.artifact.plan.bits_per_weight,
            runtime="transformers",
            runtime_version=f"transformers {version('transformers')}",
        )
        return Accuracy(sum(hits) / len(hits), sum(hits_base) / len(hits), verdict)

    @naming_arguments()
    def export(self, out: str | Path, to: str | None = None) -> Path:
        return export.export(self.artifact, out, to=to, progress=self._progress)

    def _tokens(self, text: Text, start: bool = False) -> list[int]:
        return list(self.artifact.tokenizer(text, add_special_tokens=start)["input_ids"]) if isinstance(text, str) else list(text)


def _logits(module: Any, tokens: list[int]) -> Tensor:
    import torch

    with torch.inference_mode():
        logits: Tensor = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.float()
