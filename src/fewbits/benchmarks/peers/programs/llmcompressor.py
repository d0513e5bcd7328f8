"""llm-compressor: a model folder and samples of tokens in, a compressed-tensors folder out, by GPTQ, by AWQ or by plain rounding.

`observer` fits the range of each group: `mse` searches it, which is better than the default of the largest values. GPTQ is at its defaults
otherwise (columns by falling activation, damping 0.01, block after block on the outputs of quantized ones); AWQ searches scales with and
without the weights' own sizes (`duo_scaling="both"`), as its examples do. The output matrix stays in float, as in all of its examples.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    from datasets import Dataset  # type: ignore[import-not-found]
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _leave_memory_unpinned()
    samples, out = json.loads(Path(job["samples"]).read_text()), Path(job["out"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
    oneshot(
        model=model,
        tokenizer=tokenizer,
        recipe=_recipe(job),
        dataset=Dataset.from_list([{"input_ids": sample, "attention_mask": [1] * len(sample)} for sample in samples]),
        num_calibration_samples=len(samples),
        max_seq_length=max(len(sample) for sample in samples),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(out / "made", save_compressed=True)
    tokenizer.save_pretrained(out / "made")
    versions = {name: version(name) for name in ("llmcompressor", "compressed-tensors", "torch", "transformers")}
    (out / "made.json").write_text(json.dumps({"path": "made", "versions": versions}))


def _recipe(job: dict[str, Any]) -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]
    from llmcompressor.modifiers.transform.awq import AWQModifier  # type: ignore[import-not-found]

    what: dict[str, Any] = {"config_groups": {"all": {"targets": ["Linear"], "weights": job["weights"]}}, "ignore": ["lm_head"]}
    if job["method"] == "gptq":
        return [GPTQModifier(**what)]
    if job["method"] == "rtn":
        return [QuantizationModifier(**what)]
    return [AWQModifier(duo_scaling="both"), QuantizationModifier(**what)]


def _leave_memory_unpinned() -> None:
    """AWQ pins its samples for a faster way to a GPU, and fails where there is none."""
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache  # type: ignore[import-not-found]

    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_, **__: None


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
