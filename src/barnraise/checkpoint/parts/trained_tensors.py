"""Trained parameters in the parts of a checkpoint, and a writer that never holds more than one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import safe_open

from barnraise.checkpoint.files import model_draft
from barnraise.checkpoint.parts.part_files import open_part, verify_part
from barnraise.checkpoint.serialization import shapes, tensor_bytes, unflatten
from barnraise.core.errors import ProtocolError, RunError
from barnraise.runs.checkpoint_manifest import CheckpointManifest

# Names of types in safetensors files.
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_ALIGNMENT = 8


class TensorForm(NamedTuple):
    """Type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class TrainedTensors(Mapping[str, torch.Tensor]):
    """Values of all trained parameters of a checkpoint in parts, by name. Each is read when it is asked for.

    ``forms``: their types and shapes. Raise RunError if a part is damaged or not here.
    """

    def __init__(self, folder: Path, manifest: CheckpointManifest) -> None:
        self.forms: dict[str, TensorForm] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        for part in manifest.parts:
            path = folder / part.name
            verify_part(path, part)
            with open_part(path) as (skeleton, _):
                self._note(path, skeleton)

    def _note(self, path: Path, skeleton: bytes) -> None:
        try:
            forms = shapes(skeleton)
            empty = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in forms]
            places = {id(tensor): f"t{place}" for place, tensor in enumerate(empty)}
            states: Any = unflatten(skeleton, empty)
            for name, state in states.items():
                value = state["value"]
                self._places[name] = path, places[id(value)]
                self.forms[name] = TensorForm(value.dtype, tuple(value.shape))
        except (ProtocolError, AttributeError, KeyError, TypeError) as error:
            raise RunError(f"{path} has no trained state ({error})", hint="Report this.") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        path, key = self._places[name]
        with safe_open(path, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(key)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def write_tensors(
    path: Path,
    forms: Mapping[str, TensorForm],
    read: Callable[[str], torch.Tensor],
    info: Mapping[str, str],
) -> None:
    """Write a safetensors file, one tensor after the other. ``read`` returns the tensor of a name."""
    # The largest type first, as safetensors does: so each tensor is aligned.
    names = sorted(forms, key=lambda name: (-forms[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(info)}
    start = 0
    for name in names:
        dtype, shape = forms[name]
        if dtype not in _TYPES:
            raise RunError(f"{name} is a {dtype} tensor, which cannot be written", hint="Convert it.")
        end = start + forms[name].size
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with model_draft(path) as draft, open(draft, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in names:
            tensor = read(name)
            if (tensor.dtype, tuple(tensor.shape)) != forms[name]:
                raise RunError(f"{name} has another type or shape than was announced", hint="Report this.")
            file.write(tensor_bytes(tensor))
