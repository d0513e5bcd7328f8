"""The float file in its runtime beside the float model in torch, before any work: a converter or a runtime can be silently wrong.

Where the two compute different things, statistics taken in torch mean nothing for the file, and no quantized file can be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fewbits.errors import InputError
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.model.gguf.model import GgufModel
    from fewbits.verification.session import Window

_TOKENS = 256  # enough to see a wrong graph, which is wrong at every position
_SAME_DIRECTION = 1e-3  # of encoders: 1 - cosine that rounding in the runtime may cost


def check_floor(subject: GgufModel, windows: Sequence[Window], limit: float) -> str:
    """What was measured, in words. An error if the float file's KL to the float model is above the limit."""
    from fewbits.verification import embeddings, metrics, runtimes, sandbox
    from fewbits.verification.runtimes import torch as torch_runtime

    assert subject.origin is not None, "there is nothing to compare the file with"
    runtime, file = runtimes.get("llama.cpp"), subject.file.path
    sandbox.check(runtime, file)
    some = [list(windows[0][:_TOKENS])]
    session = runtime.open(file, len(some[0]))
    try:
        reference = torch_runtime.of_model(subject.origin)
        if embeddings.given_by(subject.config):
            texts = embeddings.texts_of(some, subject.tokenizer)
            cosine = embeddings.compare_embeddings(reference, {"floor": session}, texts, silent)["floor"].cosine
            if 1 - cosine > _SAME_DIRECTION:
                raise InputError(f"the float file `{file.name}` gives embeddings of cosine {cosine:.4f} to transformers'", _HINT)
            return f"The float file agrees with transformers: cosine {cosine:.6f} in llama.cpp"
        measured = metrics.compare_logits(reference, {"floor": session}, some, silent)["floor"]
    finally:
        session.close()
    kl = sum(measured.kl) / len(measured.kl)
    if not kl <= limit:
        raise InputError(
            f"llama.cpp does not compute with the float file `{file.name}` what transformers computes: a KL of {kl:.2g}, above {limit:g}",
            _HINT,
        )
    return f"The float file agrees with transformers: KL {kl:.1g} in llama.cpp"


_HINT = (
    "the converter or llama.cpp's graph differs from this model (a key missing in config.json, an unfinished architecture): try a newer "
    "llama.cpp, or `--max-floor` to go on with a file that will be wrong by that much"
)
