"""AutoRound: a model folder and samples of tokens in, a GGUF or a compressed-tensors folder out.

The settings are AutoRound's own defaults but for these. The samples are the ones that everybody gets: its default text needs a network.
It computes in float32, where on a CPU it would round a float16 model to bfloat16 first. Its converter knows tokenizers by a hash and
refuses others: such a vocabulary is written as `default`, since files are judged on token ids.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

_DATASET = "samples_of_fewbits"  # as the registry of AutoRound's calibration texts has them
_TRIES = 6  # sizes that AutoScheme is asked for, until its file is as large as allowed
_ENOUGH = 0.995  # of the allowed bytes
_OPTIONS = ("GGUF:Q2_K_S", "GGUF:Q3_K_S", "GGUF:Q4_K_S", "GGUF:Q5_K_S", "GGUF:Q6_K", "GGUF:Q8_0")  # for AutoScheme to choose from
_FEWEST, _MOST = 2.75, 8.75  # bits of a weight, scales included: what AutoScheme says that these options span


def main(job: dict[str, Any]) -> None:
    samples, out = json.loads(Path(job["samples"]).read_text()), Path(job["out"])
    _register(samples)
    if job["format"].startswith("gguf"):
        _name_any_tokenizer(job["model"])

    def make(scheme: Any, folder: Path, **arguments: Any) -> Path:
        from auto_round import AutoRound  # type: ignore[import-not-found]

        length = min(len(sample) for sample in samples)
        text = {"dataset": _DATASET, "seqlen": length, "nsamples": len(samples)}
        maker = AutoRound(job["model"], scheme=scheme, device_map="cpu", amp=False, **text, **arguments)
        maker.quantize_and_save(str(folder), format=job["format"])
        pattern = "*.gguf" if job["format"].startswith("gguf") else "config.json"
        (found,) = folder.rglob(pattern)
        if found.suffix != ".gguf":
            _store_as_published(found.parent, json.loads((Path(job["model"]) / "config.json").read_text()))
        return found if found.suffix == ".gguf" else found.parent

    arguments = job["arguments"]
    if "bits" in job:
        bits = _bits_within(job["bits"], job["weight_bytes"], lambda asked, at: make(_scheme(asked), at, **(arguments | {"iters": 0})), out)
        made = _within(bits, job["weight_bytes"], lambda asked, at: make(_scheme(asked), at, **arguments), out)
    else:
        made = make(job["scheme"], out / "made", **arguments)
    versions = {name: version(name) for name in ("auto-round", "torch", "transformers")}
    (out / "made.json").write_text(json.dumps({"path": str(made.relative_to(out)), "versions": versions}))


def _register(samples: list[list[int]]) -> None:
    """By name, since AutoScheme takes no samples but those of a named text."""
    from auto_round.calib_dataset import register_dataset  # type: ignore[import-not-found]
    from datasets import Dataset  # type: ignore[import-not-found]

    @register_dataset(_DATASET)  # type: ignore[untyped-decorator]
    def given(*_: Any, **__: Any) -> Any:
        return Dataset.from_list([{"input_ids": sample, "attention_mask": [1] * len(sample)} for sample in samples])


def _name_any_tokenizer(model: str) -> None:
    from auto_round.export.export_to_gguf.llama_cpp_conversion import get_conversion  # type: ignore[import-not-found]

    text_model = get_conversion(model).module.base.TextModel
    recognised = text_model.get_vocab_base_pre

    def rules(self: Any, tokenizer: Any) -> Any:
        try:
            return recognised(self, tokenizer)
        except NotImplementedError:
            return "default"

    text_model.get_vocab_base_pre = rules


def _store_as_published(folder: Path, config: dict[str, Any]) -> None:
    """What was not quantized, in the type of the checkpoint, from which float32 was made: exactly, and in half of the bytes."""
    import torch
    from safetensors.torch import load_file, save_file

    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        halves = {name: t.to(dtype) if t.dtype == torch.float32 and name.endswith(".weight") else t for name, t in tensors.items()}
        save_file(halves, file, metadata={"format": "pt"})


def _scheme(bits: float) -> Any:
    from auto_round import AutoScheme

    return AutoScheme(avg_bits=bits, options=_OPTIONS)


def _bits_within(bits: float, allowed: int, make: Callable[[float, Path], Path], out: Path) -> float:
    """The average to ask AutoScheme for. Its count is not the file's: it takes a Q3_K for 4.0 bits, which are 3.44, and does not see what
    columns that do not divide fall back to. Found with files that were not tuned; the scores of layers are measured once."""
    best = _FEWEST
    for number in range(_TRIES):
        try:
            held, weights = _weights(make(bits, out / f"try-{number}"))
        except ValueError as refused:  # with the embedding in the type that goes with this average, the rest would be below all types
            print(f"AutoScheme refuses {bits:.3f} bits: {refused}", flush=True)  # noqa: T201 - into the log
            bits = (bits + best) / 2 if best > _FEWEST else bits + 0.1
            continue
        shutil.rmtree(out / f"try-{number}")
        print(f"AutoScheme at {bits:.3f} bits: {held} of {allowed} bytes", flush=True)  # noqa: T201 - into the log
        if held <= allowed:
            best = max(best, bits)
            if held >= _ENOUGH * allowed:
                break
        moved = min(_MOST, max(_FEWEST, bits - 8 * (held - 0.998 * allowed) / weights))
        if abs(moved - bits) < 1e-3:
            break
        bits = moved
    return best


def _within(bits: float, allowed: int, make: Callable[[float, Path], Path], out: Path) -> Path:
    """Tuned layers may be scored otherwise than untuned ones: a file that is too large is made again."""
    for number in range(_TRIES):
        made = make(bits, out / f"made-{number}")
        held, weights = _weights(made)
        if held <= allowed or bits <= _FEWEST:
            return made
        bits = max(_FEWEST, bits - 8 * (held - 0.998 * allowed) / weights)
    raise SystemExit(f"AutoScheme takes {held} bytes, and {allowed} are allowed")


def _weights(file: Path) -> tuple[int, int]:
    """Bytes of all matrices, and how many weights they hold."""
    from gguf import GGUFReader

    matrices = [tensor for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1]
    return sum(int(t.n_bytes) for t in matrices), sum(int(t.n_elements) for t in matrices)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
