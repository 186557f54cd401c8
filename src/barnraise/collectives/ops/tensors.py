"""Checks of an operation's tensors, and views of the forms in which torch passes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from barnraise.collectives.ops.dtypes import ElementType, by_name
from barnraise.core.errors import OperationMismatch, UnsupportedOperation


def element_type_of(tensor: torch.Tensor) -> ElementType:
    if tensor.layout is not torch.strided:
        raise UnsupportedOperation(
            f"a tensor of layout {tensor.layout} cannot be moved", hint="Call to_dense() first."
        )
    return by_name(str(tensor.dtype).removeprefix("torch."))


def only(tensors: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the single tensor of a call. torch's own layers pass it in a list or bare."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UnsupportedOperation(f"{len(tensors)} tensors in one call", hint="Call it once per tensor.")
    return tensors[0]


def split_blocks(whole: torch.Tensor, block: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Split a concatenated or stacked tensor into one block per rank, each a view of it."""
    if whole.numel() != block.numel() * world:
        raise OperationMismatch(
            f"a tensor of {whole.numel()} elements does not hold {world} blocks of {block.numel()}"
        )
    if not whole.is_contiguous():
        raise UnsupportedOperation(
            "the concatenated tensor must be contiguous", hint="Call contiguous() on it first."
        )
    return list(whole.data.view(world, -1).unbind()) if block.numel() else [whole.data.view(-1)] * world


def split_rows(tensor: torch.Tensor, splits: Sequence[int], world: int) -> list[torch.Tensor]:
    """Split a tensor into one block of rows per rank. Without ``splits`` the blocks are equal."""
    plain = tensor.data if tensor.dim() else tensor.data.view(1)
    rows = plain.shape[0]
    if not splits:
        if rows % world:
            raise OperationMismatch(
                f"{rows} rows cannot be split evenly over {world} ranks", hint="Give split sizes."
            )
        splits = [rows // world] * world
    if sum(splits) != rows:
        raise OperationMismatch(f"splits of {sum(splits)} rows in all do not fit a tensor of {rows}")
    return list(torch.split(plain, list(splits)))


def check_blocks(
    blocks: Sequence[torch.Tensor], element: ElementType, world: int, equal: int | None = None
) -> None:
    """Check that there is one block per rank, all of one dtype.

    If ``equal`` is given, each block must have this number of elements.
    """
    if len(blocks) != world:
        raise OperationMismatch(f"{len(blocks)} blocks were given to a group of {world} ranks")
    for block in blocks:
        if element_type_of(block) != element:
            raise OperationMismatch(
                f"blocks of {element_type_of(block).name} and {element.name} in one operation",
                hint="Convert them to one dtype first.",
            )
        if equal is not None and block.numel() != equal:
            raise OperationMismatch(f"blocks of {block.numel()} and {equal} elements in one operation")
