"""A folder for onnxruntime-genai: a decoder with its KV cache, its tokenizer, and how to generate from it.

    model.onnx            the graph, see graph.py: weights run packed, as in the target `onnx`
    model.onnx.data       every array, see data.py
    genai_config.json     sizes, token ids, the usual way to choose tokens
    tokenizer.json ...    as the source had them

The KV cache is float32: ONNX Runtime 1.31 takes a float16 one on the CPU, but casts all of it to float32 and back in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.errors import MissingError
from fewbits.store.scratch import scratch_folder
from fewbits.targets.onnx import Onnx, storage
from fewbits.targets.onnx_genai import families
from fewbits.targets.running import PROMPT, Command

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.formats import Format
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress

_LENGTH = 256  # tokens of the example, prompt included: it takes the cache that this needs


class OnnxGenai(Onnx):
    """What a weight may be and what it weighs is the same as for one .onnx file."""

    name = "onnx-genai"
    about = "a folder for onnxruntime-genai: an ONNX decoder with its KV cache and tokenizer"
    file_name = "model.genai"
    runtime = "onnxruntime-genai"
    marker = "genai_config.json"

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        return "MatMulNBits rounds its inputs to 8 bits by itself (accuracy level 4), with a scale per block of columns, not per token"

    def accepts_kv(self, kv: str) -> str | None:
        if kv == "float":
            return None
        return "ONNX Runtime rounds a cache with one scale per channel for all tokens, fixed beforehand, and no minimum"

    def supports(self, config: Any, tokenizer: Any) -> str | None:
        if not find_spec("onnx"):
            raise MissingError("writing ONNX needs the package `onnx`", "pip install 'fewbits[genai]'")
        return families.unsupported(config)

    @property
    def library(self) -> str:
        return "onnxruntime-genai"

    def how_to_run(self, shown: Path, context: int | None, embeds: bool) -> tuple[Command, ...]:
        lines = (
            "import onnxruntime_genai as og",
            f"model = og.Model({str(shown)!r})",
            "tokenizer, parameters = og.Tokenizer(model), og.GeneratorParams(model)",
            f"parameters.set_search_options(max_length={min(context or _LENGTH, _LENGTH)})" + (f"  # up to {context}" if context else ""),
            "generator = og.Generator(model, parameters)",
            f'generator.append_tokens(tokenizer.encode("{PROMPT}"))',
            "while not generator.is_done():",
            "    generator.generate_next_token()",
            "print(tokenizer.decode(generator.get_sequence(0)))",
        )
        return (Command("text with onnxruntime-genai, in Python", "\n".join(lines), "python"),)

    def overhead(self, draft: Draft) -> int:
        from fewbits.model.onnx import external_data
        from fewbits.targets.onnx_genai import data, graph, settings

        decoder, stores = families.of(draft.config), self._stores(draft)
        placed = data.layout(draft, stores, decoder)
        model = graph.build(draft, stores, decoder, placed, self.accuracy_level)
        with scratch_folder() as scratch, _assets_of(draft) as assets:
            settings.write(Path(scratch), assets, decoder, draft.config, draft.tokenizer)
            assets_bytes = sum(file.stat().st_size for file in Path(scratch).iterdir())
        return len(model.SerializeToString()) + external_data.nbytes(placed) + assets_bytes - draft.plan.nbytes

    def write(self, artifact: Artifact, path: Path, progress: Progress[Weight]) -> None:
        from fewbits.targets.onnx_genai import data, graph, settings

        decoder, stores = families.of(artifact.config), self._stores(artifact)
        placed = data.layout(artifact, stores, decoder)
        model = graph.build(artifact, stores, decoder, placed, self.accuracy_level)
        path.mkdir()
        (path / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))
        data.write(path / data.FILE, artifact, stores, decoder, placed, progress)
        settings.write(path, artifact.path, decoder, artifact.config, artifact.tokenizer)

    def _stores(self, artifact: Artifact | Draft) -> dict[str, storage.Store]:
        return {
            weight.name: storage.store(formats.get(artifact.plan[weight.name].format), weight.shape, self.accuracy_level)
            for weight in artifact.weights
        }


@contextmanager
def _assets_of(draft: Draft) -> Iterator[Path]:
    """What an artifact of this draft would have beside its weights."""
    with scratch_folder() as folder:
        draft.model.checkpoint.save_assets(Path(folder))
        yield Path(folder)


TARGET = OnnxGenai()
