"""PowerSGD: a matrix as the product of two thin ones, found with one step of a power iteration.

It is no codec of the port. A codec turns one member's tensor into bytes that stand for themselves; here the
members first sum a projection P = M Q, make its columns orthonormal, and only then know with what to form Q =
M^T P, which is summed, too. So it takes two sums one after the other, it needs the shapes of the tensors, and
it remembers Q, which must be the same on all members, from one step to the next. Tensors that are no
matrices, or too small to gain anything, travel whole with the first sum.

What happens after a sum is computed in an order of its own (see `folding`): all members get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from blake3 import blake3

from barnraise.compression.allreduce.deterministic_sum import sum_rows
from barnraise.compression.allreduce.error_feedback import FeedbackPart
from barnraise.core.errors import ConfigError, OperationMismatch, RunError

MOST_RANK = 64
_GAIN = 2  # the thin ones must have at most 1/2 of the numbers
_DEPENDENT = 1e-10  # of a column's own square: what is left of it is rounding
_CHECK = 4


class Matrix(NamedTuple):
    """A part seen as a matrix, and where it begins in the flat tensor."""

    name: str
    first: int
    rows: int
    columns: int

    @property
    def last(self) -> int:
        return self.first + self.rows * self.columns

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.first : self.last].view(self.rows, self.columns)


class Split(NamedTuple):
    """Which parts of a flat tensor are factored, and the spans of what travels whole."""

    matrices: tuple[Matrix, ...]
    spans: tuple[slice, ...]


class PowerSGD:
    """Rank ``rank``. All members must hold the same factors: load a member's, or `restart` on all of them."""

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        if not 1 <= rank <= MOST_RANK:
            raise ConfigError(
                f"powersgd cannot have the rank {rank}",
                hint=f"Give a rank from 1 to {MOST_RANK}, such as powersgd:rank=4.",
            )
        self.rank, self.seed = rank, seed
        self._factors: dict[str, torch.Tensor] = {}

    @property
    def name(self) -> str:
        return f"powersgd:rank={self.rank},seed={self.seed}"

    def split(self, parts: Sequence[FeedbackPart]) -> Split:
        matrices, spans, first = [], [], 0
        for part in parts:
            last = first + part.numel
            rows = part.shape[0] if len(part.shape) > 1 and part.numel else 0
            columns = part.numel // rows if rows else 0
            if rows and part.numel >= _GAIN * self.rank * (rows + columns):
                matrices.append(Matrix(part.name, first, rows, columns))
            else:
                spans.append(slice(first, last))
            first = last
        return Split(tuple(matrices), tuple(spans))

    def factor(self, matrix: Matrix, step: int) -> torch.Tensor:
        """Q to project with, its columns orthonormal; columns that were lost are drawn anew."""
        kept = self._factors.get(matrix.name)
        if kept is None or kept.shape != (matrix.columns, self.rank):
            return orthonormal(self._drawn(matrix, 0))
        found = orthonormal(kept)
        is_lost = ~found.any(dim=0)
        if not is_lost.any():
            return found
        return orthonormal(torch.where(is_lost, self._drawn(matrix, 1 + step), found))

    def keep(self, factors: Mapping[str, torch.Tensor]) -> None:
        """The summed Q of each matrix, once the step counts."""
        self._factors |= factors

    def restart(self) -> None:
        self._factors.clear()

    def state_dict(self) -> dict[str, Any]:
        """The same on all members, unlike residuals: a newcomer loads it from any of them."""
        return {"factors": {name: one.detach().cpu().clone() for name, one in self._factors.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        factors = state.get("factors")
        if not isinstance(factors, Mapping) or not all(map(self._is_factor, factors.items())):
            raise RunError(
                f"what was loaded is not the state of {self.name}",
                hint="Load the state of a member with the same rank, or call restart() on all members.",
            )
        self._factors = {name: one.clone() for name, one in factors.items()}

    def _is_factor(self, item: tuple[object, object]) -> bool:
        name, one = item
        return (
            isinstance(name, str)
            and isinstance(one, torch.Tensor)
            and one.dtype == torch.float32
            and one.dim() == 2
            and one.shape[1] == self.rank
            and bool(torch.isfinite(one).all())
        )

    def _drawn(self, matrix: Matrix, number: int) -> torch.Tensor:
        """Uniform in -1 to 1, the same on every machine and in every version."""
        word = f"{self.seed}/{number}/{matrix.columns}/{self.rank}/{matrix.name}"
        key = int.from_bytes(blake3(word.encode()).digest(length=16), "little")
        raw = numpy.random.Philox(key=key).random_raw(matrix.columns * self.rank) >> numpy.uint64(11)
        unit = torch.from_numpy(raw.astype(numpy.float64)).div_(2.0**52).sub_(1.0)
        return unit.to(torch.float32).view(matrix.columns, self.rank)


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Columns that span the same, orthogonal and of length 1; zeros where one depends on those before it.

    In float64, by the Cholesky factor of the columns' products with each other, in plain Python numbers.
    """
    wide = columns.detach().cpu().double()
    rank = wide.shape[1]
    largest = float(wide.abs().max()) if wide.numel() else 0.0
    if largest == 0.0:
        return torch.zeros_like(columns)
    wide = wide / largest
    products: list[list[float]] = sum_rows(wide.unsqueeze(2) * wide.unsqueeze(1)).tolist()
    result = torch.zeros_like(wide)
    lower = [[0.0] * rank for _ in range(rank)]
    for j in range(rank):
        for i in range(j):
            if lower[i][i]:
                lower[j][i] = (products[j][i] - _dot(lower[j], lower[i], i)) / lower[i][i]
        left = products[j][j] - _dot(lower[j], lower[j], j)
        if left <= _DEPENDENT * products[j][j] or left <= 0.0:
            continue
        lower[j][j] = math.sqrt(left)
        column = wide[:, j].clone()
        for i in range(j):
            column.sub_(result[:, i] * lower[j][i])
        result[:, j] = column.div_(lower[j][j])
    return result.to(torch.float32).to(columns.device)


def _dot(left: Sequence[float], right: Sequence[float], count: int) -> float:
    total = 0.0  # not sum(), which newer Pythons round differently
    for number in range(count):
        total += left[number] * right[number]
    return total


def restore(p: torch.Tensor, q: torch.Tensor, into: torch.Tensor) -> None:
    """``into`` becomes P Q^T, column by column, so that no library chooses the order of the additions."""
    rows = max(1, (1 << 17) // max(1, into.shape[1])) if into.device.type == "cpu" else max(1, into.shape[0])
    turned = q.t().contiguous()
    for first in range(0, into.shape[0], rows):
        some = slice(first, first + rows)
        torch.mul(p[some, :1], turned[:1], out=into[some])
        for number in range(1, p.shape[1]):
            into[some].add_(p[some, number : number + 1] * turned[number : number + 1])


def fingerprint(factors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A few small whole numbers and their squares: their sums over members show whether all were the same."""
    digest = blake3()
    for one in factors:
        digest.update(one.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    marks = torch.tensor(list(digest.digest(length=_CHECK)), dtype=torch.float32, device=device)
    return torch.cat([marks, marks.square()])


def require_equal(summed: torch.Tensor, world: int) -> None:
    """Every member sees the same sums, so either all raise or none."""
    marks, squares = summed[:_CHECK].double(), summed[_CHECK:].double()
    if not torch.equal(squares * world, marks.square()):
        raise OperationMismatch(
            "members hold different factors for powersgd",
            hint="Load the state of one member on the newcomers, or call restart() on all members.",
        )
