"""A model of transformers as tensors that are numbers in place of values, to be followed through other packages' changes of layout.

In one set the value of every element is the number of its row, in the other that of its column. Such tensors are one vector each, expanded:
a model of any size takes no memory. Rows are counted over all matrices, so that a number says whose row it is.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Experts = Literal["apart", "together", "in blocks"]
NARROW = 64  # columns of an expert while it is followed: a stack of real ones, which mlx-lm would make, takes gigabytes


class Rows(NamedTuple):
    """Consecutive rows of a tensor: which rows of which matrix they are."""

    parameter: str
    expert: int | None
    rows: Tensor  # int64


class _Matrix(NamedTuple):
    parameter: str
    expert: int | None
    first: int  # number of its first row
    rows: int
    cols: int


class Probes:
    def __init__(self, config: Any) -> None:
        from fewbits.model import experts
        from fewbits.targets.compressed_tensors.layout import skeleton

        self.module = skeleton(config)
        self._stacks = experts.find(self.module, config)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter and stored buffer; one that is tied to another is left out."""
        every = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        buffers = {name: tensor for name, tensor in self.module.state_dict().items() if name not in every}
        return {name: tuple(tensor.shape) for name, tensor in (dict(self.module.named_parameters()) | buffers).items()}

    @cached_property
    def matrices(self) -> dict[str, bool]:
        """The parameters that hold matrices which a plan can quantize, and whether these lie as (cols, rows)."""
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        found = dict(self._stacks)
        for name, module in self.module.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding | Conv1D) and f"{name}.weight" in self.shapes:
                found[f"{name}.weight"] = isinstance(module, Conv1D)
        return found

    @cached_property
    def _all(self) -> list[_Matrix]:
        found, first = [], 1
        for name in self.matrices:
            rows, cols = self.matrix_shape(name)
            for expert in range(self.shapes[name][0]) if len(self.shapes[name]) > 2 else [None]:
                found.append(_Matrix(name, expert, first, rows, cols))
                first += rows
        return found

    @cached_property
    def _firsts(self) -> list[int]:
        return [matrix.first for matrix in self._all]

    def tensors(self, what: Literal["rows", "columns"], narrow: bool) -> dict[str, Tensor]:
        """Every parameter; what holds no matrix is zeros. `narrow`: experts have at most `NARROW` columns."""
        import torch

        made = {name: torch.zeros(()).expand(shape) for name, shape in self.shapes.items() if name not in self.matrices}
        first = {}
        for matrix in reversed(self._all):
            first[matrix.parameter] = matrix
        for name, transposed in self.matrices.items():
            matrix, stack = first[name], self.shapes[name][:-2]
            cols = min(matrix.cols, NARROW) if narrow and stack else matrix.cols
            if what == "rows":
                count = matrix.rows * (stack[0] if stack else 1)
                vector = torch.arange(matrix.first, matrix.first + count, dtype=torch.int32).reshape(*stack, matrix.rows, 1)
            else:
                vector = torch.arange(cols, dtype=torch.int32)
            tensor = vector.expand(*stack, matrix.rows, cols)
            made[name] = tensor.mT if transposed else tensor
        return made

    def found(self, numbers: Tensor, columns: Tensor) -> tuple[Rows, ...] | None:
        """Of a tensor that was made of both sets: the rows that it holds; None: it is not made of whole rows."""
        import torch

        if {numbers.dtype, columns.dtype} == {torch.uint32}:  # MLX looked at blocks as words
            numbers, columns = numbers.view(torch.int32), columns.view(torch.int32)
        if numbers.dim() < 2 or {numbers.dtype, columns.dtype} != {torch.int32} or not numbers.numel():
            return None
        constant = numbers[..., :1] if numbers.stride(-1) == 0 else numbers
        order = columns
        for axis in range(columns.dim() - 1):
            if columns.stride(axis) == 0:
                order = order.narrow(axis, 0, 1)
        if not bool((constant == constant[..., :1]).all()) or not bool((order == torch.arange(columns.shape[-1])).all()):
            return None
        return self._rows(numbers[..., 0].reshape(-1).long())

    def _rows(self, numbers: Tensor) -> tuple[Rows, ...] | None:
        import torch

        firsts = torch.tensor([*self._firsts, self._all[-1].first + self._all[-1].rows])
        if not 1 <= int(numbers.min()) <= int(numbers.max()) < int(firsts[-1]):
            return None
        whose = torch.bucketize(numbers, firsts, right=True) - 1
        ends = [*(torch.nonzero(whose[1:] != whose[:-1]).flatten() + 1).tolist(), len(numbers)]
        parts, start = [], 0
        for end in ends:
            matrix = self._all[int(whose[start])]
            parts.append(Rows(matrix.parameter, matrix.expert, numbers[start:end] - matrix.first))
            start = end
        return tuple(parts)

    def matrix_shape(self, parameter: str) -> tuple[int, int]:
        """(rows, cols) of each of its matrices."""
        rows, cols = self.shapes[parameter][-2:]
        return (cols, rows) if self.matrices[parameter] else (rows, cols)

    def rows_of(self, parameter: str) -> int:
        """Of all its matrices."""
        return self.matrix_shape(parameter)[0] * math.prod(self.shapes[parameter][:-2])

    def published(self, tensors: dict[str, Tensor], prefixed: bool = True, experts: Experts = "apart") -> dict[str, Tensor]:
        """The same tensors under the names and in the form in which the model is published, by transformers' own rules. `prefixed`: with
        the name of the base model, which some files leave out. `experts`: those of a layer may stay together, or be in mxfp4's blocks."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, apply_renamings, revert_weight_conversion

        whole = {} if experts == "apart" else self._stacks
        made: dict[str, Tensor] = revert_weight_conversion(self.module, {name: each for name, each in tensors.items() if name not in whole})
        rules = [rule for rule in get_model_conversion_mapping(self.module, add_legacy=False) if isinstance(rule, WeightRenaming)]
        back = [rule.reverse_transform() for rule in reversed(rules)] if whole else []
        for name, transposed in whole.items():
            published, tensor = apply_renamings(name, back), tensors[name]
            if experts == "in blocks":  # (experts, rows, groups, 16), whatever the file calls the columns of a module
                published, tensor = f"{published}_blocks", (tensor.mT if transposed else tensor).unflatten(-1, (-1, 16))
            made[published] = tensor
        prefix = "" if prefixed else f"{self.module.base_model_prefix}."
        return {name.removeprefix(prefix): tensor for name, tensor in made.items()}
