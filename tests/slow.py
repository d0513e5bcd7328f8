"""Obviously right twins: one value at a time, no vectors, no cleverness. What is fast must equal these."""

from __future__ import annotations

import itertools
import math

import gguf
import torch
from torch import Tensor

from fewbits.formats.storage import codes


def encode_one(value: float, levels: tuple[float, ...], scale: float, offset: float) -> int:
    """The code whose decoded value is nearest, by trying all of them; of two equally near ones, either may be taken."""
    x = 0.0 if scale == 0 else (value - offset) / scale
    return min(range(len(levels)), key=lambda code: abs(levels[code] - x))


def level_values(codes: Tensor, levels: tuple[float, ...]) -> Tensor:
    return torch.tensor([[levels[code] for code in row] for row in codes.tolist()])


def scaled(values: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    out = torch.empty(values.shape)
    for r in range(values.shape[0]):
        for c in range(values.shape[1]):
            out[r, c] = scale.expand_as(out)[r, c] * values[r, c]
            if offset is not None:
                out[r, c] += offset.expand_as(out)[r, c]
    return out


# Codebooks of vectors, as ggml's decoders describe them: (points in a code, bits of a point's number, unit, what lies above the numbers).
# The points are the gguf package's.
VECTOR_CODES = {
    "iq1_s": (1, 11, 1.0, "nothing"),
    "iq1_m": (1, 11, 1.0, "a shift"),
    "iq2_xxs": (1, 8, 1 / 8, "even signs"),
    "iq2_xs": (1, 9, 1 / 8, "even signs"),
    "iq2_s": (1, 10, 1 / 8, "signs"),
    "iq3_xxs": (2, 8, 1 / 4, "even signs"),
    "iq3_s": (1, 9, 1.0, "signs"),
}


def points(name: str) -> list[list[float]]:
    kind = getattr(gguf.quants, name.upper())
    kind.init_grid()
    return (kind.grid.reshape(kind.grid_shape).astype(float) * VECTOR_CODES[name][2]).tolist()


def vector_values(codes: Tensor, name: str) -> Tensor:
    count, bits, _, above = VECTOR_CODES[name]
    grid, rows = points(name), []
    for row in codes.tolist():
        values: list[float] = []
        for code in row:
            numbers, rest = [code >> bits * i & (1 << bits) - 1 for i in range(count)], code >> bits * count
            vector = [value for number in numbers for value in grid[number]]
            if "signs" in above:
                vector = [-value if rest >> i & 1 else value for i, value in enumerate(vector)]
            elif above == "a shift":
                vector = [value + (-1 / 8 if rest else 1 / 8) for value in vector]
            values += vector
        rows.append(values)
    return torch.tensor(rows)


def allowed_signs(name: str) -> list[tuple[int, ...]]:
    """Of a vector, as factors."""
    count, _, _, above = VECTOR_CODES[name]
    every = list(itertools.product((1, -1), repeat=count * len(points(name)[0])))
    if "signs" not in above:
        return [every[0]]
    return [signs for signs in every if above == "signs" or signs.count(-1) % 2 == 0]


def least_cost(x: Tensor, weight: Tensor, name: str, signs: list[tuple[int, ...]]) -> float:
    """The weighted squared error of the best code for x (dimension,), by trying every point under all of these signs, in float64.
    Two points of one code do not touch each other's weights, so each is tried by itself."""
    count, _, _, above = VECTOR_CODES[name]
    grid = torch.tensor(points(name), dtype=torch.float64)
    shifts = (1 / 8, -1 / 8) if above == "a shift" else (0.0,)
    best = math.inf
    for shift, factors in itertools.product(shifts, signs):
        sizes = ((x.double() - shift) * torch.tensor(factors)).reshape(count, -1)
        errors = (sizes.unsqueeze(1) - grid).square() * weight.double().reshape(count, 1, -1)
        best = min(best, float(errors.sum(2).min(1).values.sum()))
    return best


def greedy_signs(x: Tensor, weight: Tensor, name: str) -> tuple[int, ...]:
    """Those of the weights; where they must be even and are not, the cheapest to get wrong is wrong."""
    signs = [-1 if value < 0 else 1 for value in x.tolist()]
    if VECTOR_CODES[name][3] == "even signs" and signs.count(-1) % 2:
        prices = (x.abs() * weight).tolist()
        signs[prices.index(min(prices))] *= -1
    return tuple(signs)


def kl(p_logits: list[float], q_logits: list[float]) -> float:
    def softmax(logits: list[float]) -> list[float]:
        top = max(logits)
        raised = [math.exp(x - top) for x in logits]
        return [x / sum(raised) for x in raised]

    return sum(p * math.log(p / q) for p, q in zip(softmax(p_logits), softmax(q_logits), strict=True))


# Error feedback as the papers on optimal brain quantization write it: an inverse of what is left of the Hessian at every step, and
# the weights not yet rounded are moved. Columns stay where they are; rows are independent. Everything in float64.

Compensations = list[tuple[int, list[int], Tensor, float]]  # (column, the ones still to come, how they move per unit of error, pivot)


def damped(hessian: Tensor, damping: float) -> Tensor:
    h = hessian.double().clone()
    dead = [j for j in range(len(h)) if h[j, j] == 0]
    alive = [j for j in range(len(h)) if h[j, j] != 0]
    mean = sum(float(h[j, j]) for j in alive) / len(alive)
    for j in dead:
        h[j, :] = h[:, j] = 0
        h[j, j] = mean
    return h + damping * mean * torch.eye(len(h), dtype=torch.float64)


def visiting_order(hessian: Tensor, width: int, order: str, dimension: int = 1) -> list[list[int]]:
    """Blocks of columns, in the order of their visits. Columns under one code stay together."""
    if dimension > 1:
        means = hessian.double().diagonal().reshape(-1, dimension).mean(1)
        by_vector = visiting_order(means.diag(), width // dimension, order)
        return [[vector * dimension + i for vector in block for i in range(dimension)] for block in by_vector]
    cols, diagonal = len(hessian), hessian.double().diagonal().tolist()
    if order == "columns":
        return [sorted(range(cols), key=lambda j: -diagonal[j])]
    blocks = [list(range(start, start + width)) for start in range(0, cols, width)]
    if order == "natural":
        return blocks
    blocks.sort(key=lambda block: -sum(diagonal[j] for j in block))
    return [sorted(block, key=lambda j: -diagonal[j]) for block in blocks]


def compensations(h: Tensor, visits: list[int]) -> Compensations:
    steps: Compensations = []
    for step, column in enumerate(visits):
        left = visits[step:]
        inverse = torch.linalg.inv(h[left][:, left])
        steps.append((column, left[1:], inverse[0, 1:] / inverse[0, 0], float(1 / inverse[0, 0])))
    return steps


class Feedback:
    """The slow twin of feedback.solve: `first_pass`, then any number of `improve` and `descend`."""

    def __init__(self, w: Tensor, fmt, h: Tensor, blocks: list[list[int]], steps, local, diagonal: Tensor) -> None:
        self.w, self.fmt, self.h, self.blocks, self.steps = w.double(), fmt, h, blocks, steps
        self.local = local  # the compensations of a block (its columns) by itself
        self.codes, self.q = torch.zeros(w.shape, dtype=torch.uint8), self.w.clone()
        self.grids: dict[int, dict[str, Tensor]] = {}  # by the first column of the block
        pivots = {column: pivot for column, _, _, pivot in steps}
        self.stakes = torch.tensor([math.sqrt(float(diagonal[j]) * pivots[j]) for j in range(w.shape[1])])
        self.fixed = fmt.fit(w, self.stakes) if fmt.tensor_wide else None

    def fit(self, values: Tensor, block: list[int]) -> dict[str, Tensor]:  # values (rows, cols): of which the block's are read
        natural = sorted(block)
        return self.fmt.fit(values[:, natural].float().contiguous(), self.stakes[natural], self.fixed)

    def rounded(self, values: Tensor, column: int, block: list[int], grid: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scale, offset = self.fmt.affine(grid, torch.tensor([column - min(block)]))
        chosen = codes.encode(values.unsqueeze(1), self.fmt.levels, scale, offset)
        return chosen[:, 0], codes.decode(chosen, self.fmt.levels, scale, offset)[:, 0].double()

    def first_pass(self) -> None:
        moved, steps = self.w.clone(), iter(self.steps)
        for block in self.blocks:
            grid = self.grids[min(block)] = self.fit(moved, block)
            for _ in block:
                self._round_next(moved, next(steps), block, grid, self.codes, self.q)

    def improve(self, refit: bool) -> None:
        for block in self.blocks:
            rest = [j for j in range(len(self.h)) if j not in block]
            if not rest:
                return
            inside = self.h[block][:, block]
            best = self.w.clone()
            best[:, block] += (self.w - self.q)[:, rest] @ self.h[rest][:, block] @ torch.linalg.inv(inside)
            grid = self.fit(best, block) if refit else self.grids[min(block)]
            codes, q, moved = self.codes.clone(), self.q.clone(), best.clone()
            for step in self.local(tuple(block)):
                self._round_next(moved, step, block, grid, codes, q)
            self._descend_block(block, grid, codes, q)
            better = self.loss(q) < self.loss(self.q)
            for row in better.nonzero()[:, 0].tolist():
                self.codes[row], self.q[row] = codes[row], q[row]
                for name, entry in self.grids[min(block)].items():
                    if refit and not (self.fmt.tensor_wide and entry.shape == (1, 1)):
                        entry[row] = grid[name][row]

    def descend(self) -> None:
        for block in self.blocks:
            self._descend_block(block, self.grids[min(block)], self.codes, self.q)

    def loss(self, q: Tensor) -> Tensor:
        return ((self.w - q) @ self.h * (self.w - q)).sum(1)

    def grid(self) -> dict[str, Tensor]:
        grids = [self.grids[first] for first in sorted(self.grids)]
        whole = self.fmt.tensor_wide
        return {
            name: entry if whole and entry.shape == (1, 1) else torch.cat([grid[name] for grid in grids], 1)
            for name, entry in grids[0].items()
        }

    def _round_next(self, moved: Tensor, step, block: list[int], grid: dict[str, Tensor], codes: Tensor, q: Tensor) -> None:
        column, to_come, moves, _ = step
        codes[:, column], q[:, column] = self.rounded(moved[:, column], column, block, grid)
        moved[:, to_come] -= (moved[:, column] - q[:, column]).unsqueeze(1) * moves

    def _descend_block(self, block: list[int], grid: dict[str, Tensor], codes: Tensor, q: Tensor) -> None:
        for column in block:
            self._descend_one(column, block, grid, codes, q)

    def _descend_one(self, column: int, block: list[int], grid: dict[str, Tensor], codes: Tensor, q: Tensor) -> None:
        gradient = ((self.w - q) * self.h[column]).sum(1)
        trial_codes, values = self.rounded(q[:, column] + gradient / self.h[column, column], column, block, grid)
        # what the change of one value does to the whole error: its square, less twice its share of the gradient
        change = values - q[:, column]
        better = change * change * self.h[column, column] - 2 * change * gradient < 0
        codes[better, column], q[better, column] = trial_codes[better], values[better]


# The same where a code stands for a vector of columns, as QuIP# writes it (block LDLQ): the columns of a vector are rounded together, what
# they miss by costs their Schur complement, and it moves all columns to come.

VectorCompensations = list[tuple[list[int], list[int], Tensor, Tensor]]  # (columns, to come, how these move, the metric)


def vector_compensations(h: Tensor, visits: list[int], dimension: int) -> VectorCompensations:
    steps: VectorCompensations = []
    for start in range(0, len(visits), dimension):
        left = visits[start:]
        inverse = torch.linalg.inv(h[left][:, left])
        metric = torch.linalg.inv(inverse[:dimension, :dimension])
        steps.append((left[:dimension], left[dimension:], metric @ inverse[:dimension, dimension:], metric))
    return steps


class VectorFeedback(Feedback):
    def __init__(self, w: Tensor, fmt, h: Tensor, blocks: list[list[int]], steps, local, diagonal: Tensor) -> None:
        columns: list = []  # a pivot of each column, of which the scales' importance is made: those after it in its vector are free too
        for vector, _, _, metric in steps:
            for i, column in enumerate(vector):
                columns.append((column, None, None, float(1 / torch.linalg.inv(metric[i:, i:])[0, 0])))
        super().__init__(w, fmt, h, blocks, columns, local, diagonal)
        self.steps = steps
        self.codes = torch.zeros(len(w), w.shape[1] // fmt.dimension, dtype=torch.int32)

    def first_pass(self) -> None:
        moved, steps = self.w.clone(), iter(self.steps)
        for block in self.blocks:
            grid = self.grids[min(block)] = self.fit(moved, block)
            for _ in range(len(block) // self.fmt.dimension):
                self._round_next(moved, next(steps), block, grid, self.codes, self.q)

    def descend(self) -> None:
        for block in self.blocks:
            self._descend_block(block, self.grids[min(block)], self.codes, self.q)

    def chosen(self, target: Tensor, metric: Tensor, affine: tuple[Tensor, Tensor | None], present: Tensor | None) -> Tensor:
        """The code nearest to the target by the metric's diagonal; then, once, the one nearest to where the errors of the other columns
        want each column to be. The cheaper by the whole metric is taken, and the present one if neither is cheaper."""
        scale, offset = affine

        def nearest(values: Tensor) -> Tensor:
            return self.fmt.codebook.nearest(codes.unit_values(values, scale, offset), metric.diagonal())[:, 0]

        def away(chosen: Tensor) -> Tensor:
            return target - self.values(chosen, affine)

        def cheaper(chosen: Tensor, other: Tensor) -> Tensor:
            cost, other_cost = (((missed @ metric) * missed).sum(1) for missed in (away(chosen), away(other)))
            return torch.where(cost < other_cost, chosen, other)

        best = nearest(target)
        if present is not None:
            best = cheaper(best, present)
        beside = metric / metric.diagonal() - torch.eye(len(metric), dtype=metric.dtype)
        return cheaper(nearest(target + away(best) @ beside), best)

    def values(self, chosen: Tensor, affine: tuple[Tensor, Tensor | None]) -> Tensor:
        return codes.scaled_values(self.fmt.codebook.values(chosen.unsqueeze(1)), *affine).double()

    def _affine(self, columns: list[int], block: list[int], grid: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return self.fmt.affine(grid, torch.tensor(columns) - min(block))

    def _round_next(self, moved: Tensor, step, block: list[int], grid: dict[str, Tensor], chosen: Tensor, q: Tensor) -> None:
        columns, to_come, moves, metric = step
        affine = self._affine(columns, block, grid)
        best = self.chosen(moved[:, columns], metric, affine, None)
        chosen[:, columns[0] // len(columns)], q[:, columns] = best, self.values(best, affine)
        moved[:, to_come] -= (moved[:, columns] - q[:, columns]) @ moves

    def _descend_block(self, block: list[int], grid: dict[str, Tensor], chosen: Tensor, q: Tensor) -> None:
        d = self.fmt.dimension
        for start in range(0, len(block), d):
            columns = block[start : start + d]
            metric, affine = self.h[columns][:, columns], self._affine(columns, block, grid)
            target = q[:, columns] + (self.w - q) @ self.h[:, columns] @ torch.linalg.inv(metric)
            best = self.chosen(target, metric, affine, chosen[:, columns[0] // d].clone())
            chosen[:, columns[0] // d], q[:, columns] = best, self.values(best, affine)
