"""PowerSGD: a matrix as the product of two thin ones, found with one step of a power iteration.

It is not a ``Codec``. A codec turns one member's tensor into a self-contained payload. PowerSGD needs two
sums, one after the other:

1. All members sum a projection P = M Q and make its columns orthonormal.
2. All members sum Q = M^T P.

It needs the shapes of the tensors. It keeps Q, which must be equal on all members, from one step to the
next. Tensors that are not matrices, or too small to gain anything, are sent whole with the first sum.

Computations after a sum have a fixed order (see ``deterministic_sum``), so all members get the same bits.
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

MAX_RANK = 64
_GAIN = 2  # the factors must have at most 1/2 of the numbers
_DEPENDENT = 1e-10  # relative to a column's square: the remainder is rounding error
_CHECK = 4


class Matrix(NamedTuple):
    """A part viewed as a matrix, and its first position in the flat tensor."""

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
    """The factored parts of a flat tensor, and the spans that are sent whole."""

    matrices: tuple[Matrix, ...]
    spans: tuple[slice, ...]


class PowerSGD:
    """PowerSGD of rank ``rank``. All members must hold the same factors.

    Load the state of one member on the others, or call `restart` on all of them.
    """

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        if not 1 <= rank <= MAX_RANK:
            raise ConfigError(
                f"powersgd cannot have the rank {rank}",
                hint=f"Give a rank from 1 to {MAX_RANK}, such as powersgd:rank=4.",
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
        """Return the orthonormal Q of a matrix. Columns that were lost are drawn again."""
        stored = self._factors.get(matrix.name)
        if stored is None or stored.shape != (matrix.columns, self.rank):
            return orthonormal(self._draw(matrix, 0))
        columns = orthonormal(stored)
        is_lost = ~columns.any(dim=0)
        if not is_lost.any():
            return columns
        return orthonormal(torch.where(is_lost, self._draw(matrix, 1 + step), columns))

    def keep(self, factors: Mapping[str, torch.Tensor]) -> None:
        """Store the summed Q of each matrix, after the step was committed."""
        self._factors |= factors

    def restart(self) -> None:
        self._factors.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the factors, which are equal on all members.

        A joining member loads them from any other member.
        """
        return {"factors": {name: factor.detach().cpu().clone() for name, factor in self._factors.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        factors = state.get("factors")
        if not isinstance(factors, Mapping) or not all(map(self._is_factor, factors.items())):
            raise RunError(
                f"the loaded state does not belong to {self.name}",
                hint="Load the state of a worker with the same rank, or call restart() on all workers.",
            )
        self._factors = {name: factor.clone() for name, factor in factors.items()}

    def _is_factor(self, item: tuple[object, object]) -> bool:
        name, factor = item
        return (
            isinstance(name, str)
            and isinstance(factor, torch.Tensor)
            and factor.dtype == torch.float32
            and factor.dim() == 2
            and factor.shape[1] == self.rank
            and bool(torch.isfinite(factor).all())
        )

    def _draw(self, matrix: Matrix, number: int) -> torch.Tensor:
        """Return uniform values in -1 to 1, equal on every machine and in every version."""
        word = f"{self.seed}/{number}/{matrix.columns}/{self.rank}/{matrix.name}"
        key = int.from_bytes(blake3(word.encode()).digest(length=16), "little")
        raw = numpy.random.Philox(key=key).random_raw(matrix.columns * self.rank) >> numpy.uint64(11)
        unit = torch.from_numpy(raw.astype(numpy.float64)).div_(2.0**52).sub_(1.0)
        return unit.to(torch.float32).view(matrix.columns, self.rank)


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns with the same span. A column that depends on earlier ones becomes zero.

    It computes in float64, by the Cholesky factor of the Gram matrix, in plain Python numbers.
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
    """Write P Q^T to ``into`` column by column, so that no library chooses the order of additions."""
    rows = max(1, (1 << 17) // max(1, into.shape[1])) if into.device.type == "cpu" else max(1, into.shape[0])
    turned = q.t().contiguous()
    for first in range(0, into.shape[0], rows):
        rows_slice = slice(first, first + rows)
        torch.mul(p[rows_slice, :1], turned[:1], out=into[rows_slice])
        for number in range(1, p.shape[1]):
            into[rows_slice].add_(p[rows_slice, number : number + 1] * turned[number : number + 1])


def fingerprint(factors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a few small integers and their squares. Their sums over members show if all were equal."""
    digest = blake3()
    for factor in factors:
        digest.update(factor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    marks = torch.tensor(list(digest.digest(length=_CHECK)), dtype=torch.float32, device=device)
    return torch.cat([marks, marks.square()])


def require_equal(summed: torch.Tensor, world: int) -> None:
    """Raise OperationMismatch if members hold different factors.

    All members see the same sums, so either all raise or none.
    """
    marks, squares = summed[:_CHECK].double(), summed[_CHECK:].double()
    if not torch.equal(squares * world, marks.square()):
        raise OperationMismatch(
            "workers hold different factors for powersgd",
            hint="Load the state of one worker on the joining workers, or call restart() on all workers.",
        )
