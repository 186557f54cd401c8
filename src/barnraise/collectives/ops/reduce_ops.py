"""torch's reduce operations in terms of the mover's, with the scaling that is done on the way in and out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.distributed as dist

from barnraise.collectives.comm_process.arithmetic import supported
from barnraise.collectives.ops.dtypes import ElementType
from barnraise.core.errors import UnsupportedOperation

_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """``before`` multiplies what goes in, ``divide`` what comes out."""

    name: str
    before: float | torch.Tensor | None = None
    divide: int = 1

    def fill(self, staged: torch.Tensor, values: torch.Tensor) -> None:
        if self.before is None:
            staged.copy_(values)
            return
        factor = self.before.to(values.device) if isinstance(self.before, torch.Tensor) else self.before
        # torch multiplies no eight-bit floats
        wide = values.to(torch.float32) if values.element_size() == 1 else values
        staged.copy_(wide * factor)

    def drain(self, staged: torch.Tensor, values: torch.Tensor) -> None:
        if self.divide != 1:
            exact = staged.is_floating_point() or staged.is_complex()
            staged.div_(self.divide, rounding_mode=None if exact else "trunc")
        values.copy_(staged)


def reduction_of(op: dist.ReduceOp, element: ElementType, world: int) -> Reduction:
    """Refuses, in words, what does not exist for the element type."""
    kind = op.op if hasattr(op, "op") else op
    if kind == dist.ReduceOp.PREMUL_SUM:
        if element.kind not in ("float", "complex"):
            raise UnsupportedOperation(f"PREMUL_SUM does not exist for {element.name}")
        _, factor = cast(tuple[object, float | torch.Tensor], op.__getstate__())
        return Reduction("sum", before=factor)
    return _without_factor(kind, element, world)


@cache
def _without_factor(kind: object, element: ElementType, world: int) -> Reduction:
    if kind == dist.ReduceOp.AVG:
        # As NCCL does it: Lightning averages counts wherever the backend is not called gloo.
        if element.kind not in ("float", "complex") and element.name not in ("int32", "int64"):
            raise UnsupportedOperation(
                f"AVG does not exist for {element.name}",
                hint="Use SUM and divide, or convert to a float or a wider integer type.",
            )
        # narrow floats would overflow in the sum: divide first
        narrow = element.name == "float16" or element.name.startswith("float8")
        return Reduction("sum", before=1.0 / world) if narrow else Reduction("sum", divide=world)
    name = next((name for known, name in _NAMES.items() if kind == known), None)
    if name is None or not supported(element.code, name):
        raise UnsupportedOperation(f"{kind} does not exist for {element.name}")
    return Reduction(name)
