"""The output side of error feedback: rows are corrected for the errors of rows that are already rounded.

An error E in a weight costs tr(G E H E^T), G the second moment of the gradient at its outputs. With the rows in visiting order and
G = R R^T, R upper triangular, a row costs R_kk^2 z H z^T, where

    z = w_k + sum_{i<k} (w_i - q_i) R_ik / R_kk - q_k

so each row is rounded, by feedback over its columns, to its weight plus a correction for the rows before it. The two sides do not meet:
whatever the order of columns, a row only gets another target. `GROUP` rows are rounded at once, to the best values of all of them.

G is a sum over tokens, and R fitted to few of them promises more than it holds. What a coupling from one half of the samples is worth is
read off the other half without rounding anything: rows miss their targets by errors that have nothing to do with each other, so row k
costs the k-th diagonal entry of T^T G T, T the map from those misses to errors (`held_out`).

Measured on the embedded model (KL, all linear weights in one format, relative to one-sided feedback): q4_0 .62, q4_k .76, iq2_xxs .76,
int4_g128 .72. Groups of 8 and 16 rows are no better than 32; 64 lose a quarter of the gain; a second round over all rows, given all
others, adds nothing; natural order loses a quarter of the gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.calibration import output_moments
from fewbits.methods.error_feedback.hessian import Singular, factored, free_of_block

GROUP = 32
DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0)
_TRIED = 256  # rows of a block on which damping is chosen: the best amount hardly depends on how many there are


@dataclass(frozen=True)
class Chain:
    """Rows that are coupled with each other, and with no others."""

    rows: Tensor  # (n,) in visiting order
    coupling: Tensor  # (n, n) float64: targets = weights + coupling @ errors; zero within a group and after it

    def held_out(self, moment: Tensor) -> Tensor:
        """(n,), in the order of `rows`: what a miss of each row's target costs by this moment, which is in natural order."""
        local = self.rows - self.rows.min()
        return self.held_out_by(moment.double()[local][:, local])

    def held_out_by(self, moment: Tensor) -> Tensor:
        """The same by a moment in float64 that is in the order of `rows`."""
        one = torch.eye(len(self.rows), dtype=torch.float64)
        misses: Tensor = torch.linalg.solve_triangular(self.coupling + one, one, upper=False)
        cost: Tensor = (moment @ misses).mul_(misses).sum(0)
        return cost


@dataclass(frozen=True)
class Outputs:
    chains: list[Chain]
    damping: float

    def __iter__(self) -> Iterator[tuple[Tensor, list[tuple[Tensor, Tensor]]]]:
        """(rows to round together, for each chain: earlier rows and the coupling to their errors)."""
        for start in range(0, max(len(chain.rows) for chain in self.chains), GROUP):
            here = slice(start, start + GROUP)
            live = [chain for chain in self.chains if start < len(chain.rows)]
            rows = torch.cat([chain.rows[here] for chain in live])
            yield rows, [(chain.rows[:start], chain.coupling[here, :start]) for chain in live]

    def errors_from(self, misses: Tensor) -> Tensor:
        """misses (rows, cols), float64, of the targets that rows have: the errors that rows which make up for each other are left with."""
        errors = misses.clone()
        for chain in self.chains:
            one = torch.eye(len(chain.rows), dtype=torch.float64)
            errors[chain.rows] = torch.linalg.solve_triangular(chain.coupling + one, misses[chain.rows], upper=False, unitriangular=True)
        return errors

    def held_out(self, sums: Tensor, tokens: int) -> Tensor:
        """(rows,): in place of the mean of g^2, what a miss of each row's target costs by these moments."""
        cost = torch.empty(len(sums), dtype=torch.float64)
        for chain, moment in zip(self.chains, output_moments.blocks(sums), strict=True):
            cost[chain.rows] = chain.held_out(moment)
        return (cost / max(1, tokens)).float()


def correction(earlier: Sequence[tuple[Tensor, Tensor]], errors: Tensor) -> Tensor:
    """What is added to the weights of the rows at hand. In float64, so that its last bits do not depend on the order of sums."""
    return torch.cat([(coupling @ errors[rows].double()).float() for rows, coupling in earlier])


def coupled(sums: Tensor, stakes: Tensor, damping: float) -> Outputs:
    """sums (rows, size), as `output_moments` has them; stakes (rows,): the square of the error that is expected in each row. Rows that
    cost most come first. Raises Singular."""
    chains, start = [], 0
    for moment in output_moments.blocks(sums):
        chains.append(_chain(_visited(moment, stakes[start : start + len(moment)]), start, damping))
        start += len(moment)
    return Outputs(chains, damping)


def choose_damping(fit: Tensor, judge: Tensor, stakes: Tensor) -> float | None:
    """The moments of two halves, of which one says what is left of the cost; None: no coupling lowers it."""
    fitted, other = (output_moments.blocks(half)[0] for half in (fit, judge))
    some = torch.arange(0, len(fitted), max(1, -(-len(fitted) // _TRIED)))
    fitted, other, stakes = fitted[some][:, some], other[some][:, some], stakes[: len(fitted)][some].double()
    cost: dict[float | None, float] = {None: float(other.diagonal().double() @ stakes)}
    g = order, *_ = _visited(fitted, stakes)
    other, stakes = other.double()[order][:, order], stakes[order]
    for damping in DAMPINGS:
        with suppress(Singular):
            cost[damping] = float(_chain(g, 0, damping).held_out_by(other) @ stakes)
    return min(cost, key=lambda damping: cost[damping])


def _visited(moment: Tensor, stakes: Tensor) -> tuple[Tensor, Tensor, float]:
    """(rows in visiting order, the moment in float64 in this order, the mean of its diagonal)."""
    g = moment.double()
    g = (g + g.T) / 2
    order = (g.diagonal() * stakes.double()).argsort(descending=True, stable=True)
    return order, g[order][:, order], float(g.diagonal().mean())


def _chain(visited: tuple[Tensor, Tensor, float], first: int, damping: float) -> Chain:
    order, g, mean = visited
    if not mean > 0:  # nothing moves the loss: no row can make up for another
        return Chain(first + order, torch.zeros_like(g))
    root, _ = factored(g, damping, mean)
    forward = root.T / root.diagonal().unsqueeze(1)
    coupling = torch.zeros_like(forward)
    for start in range(GROUP, len(forward), GROUP):
        here = slice(start, min(start + GROUP, len(forward)))
        coupling[here, :start] = free_of_block(forward, here)
    return Chain(first + order, coupling)
