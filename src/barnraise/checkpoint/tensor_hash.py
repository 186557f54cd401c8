"""Hash of one tensor, in pieces: a large tensor needs no second copy in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from blake3 import blake3

from barnraise.checkpoint.serialization import tensor_bytes

_PIECE_BYTES = 64 << 20
UNCOMPARED = ""  # the hash of a tensor without bytes of its own, for example on the device "meta"


def hash_tensor(tensor: torch.Tensor, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Hash dtype, shape and bytes of a tensor.

    Return `UNCOMPARED` if it has no bytes of its own, or if the process ends before the hash is complete.

    A tensor that consists of others (a quantized one of torchao) is hashed by its parts.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    for part in _parts(tensor):
        if part.layout != torch.strided or part.device.type == "meta":
            return UNCOMPARED
        hasher.update(f"{part.dtype} {list(part.shape)}\0".encode())
        for piece in _pieces(part):
            if is_stopped():
                return UNCOMPARED
            hasher.update(tensor_bytes(piece))
    return hasher.hexdigest()


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor without its subclass and without gradients; None if it consists of others."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    own = plain(tensor)
    if own is not None:
        yield own
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from _parts(getattr(tensor, name))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel() * tensor.element_size() <= _PIECE_BYTES or not tensor.dim():
        yield tensor
    elif tensor.is_contiguous():
        yield from torch.split(tensor.reshape(-1), _PIECE_BYTES // tensor.element_size())
    else:
        rows = _PIECE_BYTES * len(tensor) // (tensor.numel() * tensor.element_size())
        yield from torch.split(tensor, max(1, rows))
