"""One matrix of a model, as planners and methods see it. `_KINDS` is the only place in the project that knows names of layers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = (
    (r"(q|k|v|o|qkv|out)_proj|c_attn|attn\.c_proj|attention|attn", "attention"),
    (r"gate_proj|up_proj|down_proj|gate_up_proj|mlp|c_fc|fc\d|intermediate|dense", "mlp"),
    (r"lm_head|output|score|classifier", "output"),
)

TOWER = "tower"  # the kind of a weight that no text reaches: of a vision or audio tower, or its projector


@dataclass(frozen=True)
class Weight:
    """One matrix: y = x @ W.T with W (rows, cols), whatever the module calls it and even if it is stored transposed.

    For a convolution W is (out, in / groups * kernel), and x is what the kernel covers. For an expert W is one slice of the parameter
    that holds all experts of a block.
    """

    name: str  # path of the module, `model.layers.0.mlp.up_proj`, or of an expert, `model.layers.0.mlp.experts.down_proj.3`
    shape: tuple[int, int]
    kind: str  # attention, mlp, embedding, output, convolution, other, or tower
    dtype: str  # the cast format (fp16, bf16, fp32) that stores it without loss
    transposed: bool = False  # GPT-2's Conv1D stores (cols, rows), and so do the experts of some architectures
    tied_to: str | None = None  # a second module that reads the same matrix (an output layer tied to the embedding)
    together: str | None = None  # weights with the same value here need one format where a file stores them as one tensor
    expert: int | None = None  # index in the first dimension of the parameter

    @property
    def parameter(self) -> str:
        """Name of the module's parameter that holds this matrix."""
        return f"{self.name}.weight" if self.expert is None else self.name.rpartition(".")[0]

    def view(self, parameter: Tensor) -> Tensor:
        """This matrix, (rows, cols), in its parameter or in a tensor of the same layout (a gradient). No copy if that is contiguous."""
        matrix = parameter if self.expert is None else parameter[self.expert]
        return matrix.T if self.transposed else matrix.flatten(1)


def kind_of(name: str) -> str:
    tail = ".".join(name.split(".")[-2:])
    return next((kind for pattern, kind in _KINDS if re.search(pattern, tail)), "other")
