"""Does a runtime compute what the file says? Its logits are compared with torch's, with the very same decoded weights.

Runtimes on a CPU round activations to 8 bits before they multiply them with quantized weights, so the two never agree to the last bit.
How much this explains is measured, not assumed: torch runs once more with its activations rounded in the same blocks. What remains must
be about as small as the runtime's own error, which the float file shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn.functional import pad

from fewbits import formats
from fewbits.progress import silent
from fewbits.verification import metrics
from fewbits.verification.runtimes import torch as torch_runtime

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.calibration.text.windows import Window
    from fewbits.targets import Target
    from fewbits.verification.session import Session

# KL is quadratic in the error: a runtime that rounds as finely as our imitation, but at other places, is as far away as the imitation
# itself. The factor leaves room for another scale or order of summation; measured, the two agree to 3 % (`fewbits demo --json`).
_SLACK = 2.0
_FLOAT32_KL = 1e-7  # that another order of summation in float32 gives


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
        return math.isfinite(self.limit) and self.kl <= self.limit  # a NaN never agrees


def crosscheck(artifact: Artifact, target: Target, session: Session, windows: Sequence[Window], floor: float) -> CrossCheck:
    planned = torch_runtime.readers(artifact.plan, artifact.weights)
    decoded = torch_runtime.of_module(artifact.module(), planned)
    rounded = torch_runtime.of_module(with_rounded_activations(artifact, target), planned)
    measured = metrics.compare_logits(decoded, {"runtime": session, "rounded": rounded}, windows, silent)
    kl, explained = (float(sum(m.kl) / len(m.kl)) for m in (measured["runtime"], measured["rounded"]))
    return CrossCheck(kl, explained, floor)


def with_rounded_activations(artifact: Artifact, target: Target) -> Any:
    """The torch module with decoded weights, in which the inputs of every quantized matmul are rounded to 8 bits."""
    module = artifact.module()
    submodules = dict(module.named_modules())
    for weight in artifact.weights:
        entry = artifact.plan[weight.name]
        block = target.activation_block(weight, formats.get(entry.format))
        if block is None or entry.activation:  # the plan rounds it already
            continue
        for name in (weight.name, weight.tied_to):
            if name and (name == weight.tied_to or weight.kind != "embedding"):
                submodules[name].register_forward_pre_hook(lambda _, inputs, block=block: (round_to_int8(inputs[0], block), *inputs[1:]))
    return module


def round_to_int8(x: Tensor, block: int) -> Tensor:  # x (..., cols) -> (..., cols): each block with a scale of its own, 255 values
    cols = x.shape[-1]
    blocks = pad(x, (0, -cols % block)).unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    rounded: Tensor = (blocks / scale.clamp(min=1e-30)).round() * scale
    return rounded.flatten(-2)[..., :cols]
