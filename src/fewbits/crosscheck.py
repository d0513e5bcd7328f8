"""Does a runtime compute what the file says? Its logits against torch's with the very same decoded weights.

Runtimes on a CPU round activations to 8 bits before they multiply them with quantized weights, so the two never agree
to the last bit. How much that explains is measured, not assumed: torch runs once more with its activations rounded in
the same blocks. What remains must be of the size of the runtime's own floor (the float file in it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn.functional import pad

from fewbits import formats, verification
from fewbits.progress import silent
from fewbits.runtimes import torch as torch_runtime

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.runtimes import Session
    from fewbits.targets import Target
    from fewbits.texts import Window

# KL is quadratic in the error: a runtime that rounds as finely as the imitation, but elsewhere, is as far away as the imitation
# itself. The factor leaves room for another scale or order of summation; measured, the two agree to 3 % (`fewbits demo --json`).
_SLACK = 2.0
_FLOAT32_KL = 1e-7  # what different orders of summation in float32 give on their own


@dataclass(frozen=True)
class CrossCheck:
    kl: float  # of the runtime against torch with decoded weights
    explained: float  # of torch with 8-bit activations against torch with decoded weights
    floor: float  # of the float file in this runtime against float torch

    @property
    def limit(self) -> float:
        return _SLACK * (self.explained + self.floor) + _FLOAT32_KL

    @property
    def agrees(self) -> bool:
        return math.isfinite(self.limit) and self.kl <= self.limit  # of what is no number, nothing agrees


def crosscheck(artifact: Artifact, target: Target, session: Session, windows: Sequence[Window], floor: float) -> CrossCheck:
    planned = torch_runtime.readers(artifact.plan, artifact.weights)
    decoded = torch_runtime.of_module(artifact.module(), planned)
    rounded = torch_runtime.of_module(with_rounded_activations(artifact, target), planned)
    measured = verification.measure(decoded, {"runtime": session, "rounded": rounded}, windows, silent)
    kl, explained = (float(sum(m.kl) / len(m.kl)) for m in (measured["runtime"], measured["rounded"]))
    return CrossCheck(kl, explained, floor)


def with_rounded_activations(artifact: Artifact, target: Target) -> Any:
    """The torch module of decoded weights, every quantized matmul reading its input through 8 bits."""
    module = artifact.module()
    submodules = dict(module.named_modules())
    for weight in artifact.weights:
        entry = artifact.plan[weight.name]
        block = target.activation_block(weight, formats.get(entry.format))
        if block is None or entry.activation:  # rounded as the plan says, not once more
            continue
        for name in (weight.name, weight.tied_to):
            if name and (name == weight.tied_to or weight.kind != "embedding"):
                submodules[name].register_forward_pre_hook(lambda _, inputs, block=block: (round_to_int8(inputs[0], block), *inputs[1:]))
    return module


def round_to_int8(x: Tensor, block: int) -> Tensor:  # x (..., cols) -> the same, each block on its own grid of 255 values
    cols = x.shape[-1]
    blocks = pad(x, (0, -cols % block)).unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    rounded: Tensor = (blocks / scale.clamp(min=1e-30)).round() * scale
    return rounded.flatten(-2)[..., :cols]
