"""Plain data as bytes and back: numbers, texts, containers, numpy arrays and torch tensors. Never a pickle.

A document is a mark, the length of a head, the head (msgpack) and the contents of arrays and long texts. A
container is a list that starts with its kind. Contents stand in the order in which the head uses them. Each
is used once, so a document never becomes much larger in memory than it is on disk.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from barnraise.core.errors import RunError, ShippingError
from barnraise.core.units import format_size

MARK = b"barnraise data 1\n"
MOST_DEPTH = 100
MOST_HEAD = 32 << 20
_LONG = 1024  # longer texts go beside the head, which is limited
_MOST_DIMENSIONS = 64
_NATIVE_INTEGERS = range(-(1 << 63), 1 << 64)
# No objects and records; a long double has another form on each kind of processor.
_PLAIN_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[SU]\d+|[Mm]8(\[\w+\])?)", re.ASCII)
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_MAPPINGS: dict[str, Callable[[], dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict}
_KINDS: dict[type, str] = {
    **{maker: kind for kind, maker in _SEQUENCES.items() if isinstance(maker, type)},
    dict: "dict",
    OrderedDict: "ordered",
}
_SCALARS = frozenset([type(None), bool, int, float, complex, str, bytes])

Content = bytes | memoryview


def is_data(value: object) -> bool:
    """Tell whether a value is of a kind that can be sent; items of a container may still not be."""
    return type(value) in _SCALARS or type(value) in _KINDS or _is_numpy(value) or _is_torch(value)


def encode_values(named: Sequence[tuple[str, object]]) -> list[Content]:
    """Encode one document in pieces, to be written in order. Raise RunError for a value of another kind."""
    writer = _Writer()
    trees = [writer.root(name, value) for name, value in named]
    head = msgspec.msgpack.encode([trees, [len(content) for content in writer.contents]])
    if len(head) > MOST_HEAD:
        raise RunError(
            f"{named[-1][0] if len(named) == 1 else 'the arguments'} hold too many single values: their list "
            f"takes {format_size(len(head))}, at most {format_size(MOST_HEAD)} are possible",
            hint="Put the numbers into a numpy array or a tensor.",
        )
    return [MARK, len(head).to_bytes(8, "little"), head, *writer.contents]


def decode_values(document: bytes | memoryview) -> list[Any]:
    """Return the values in order. Raise ShippingError unless the document is complete and valid."""
    view = memoryview(document)
    begin = len(MARK) + 8
    size = int.from_bytes(view[len(MARK) : begin], "little")
    if bytes(view[: len(MARK)]) != MARK or size > MOST_HEAD or begin + size > len(view):
        raise _unsound("it does not begin as it should")
    try:
        trees, sizes = msgspec.msgpack.decode(view[begin : begin + size], type=tuple[list[Any], list[int]])
        if any(length < 0 for length in sizes) or sum(sizes) != len(view) - begin - size:
            raise ValueError("its contents are not as long as its head says")
        reader = _Reader(view[begin + size :], iter(sizes))
        values = [reader.value(tree) for tree in trees]
        if reader.has_more():
            raise ValueError("it has contents that nothing uses")
        return values
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
        raise _unsound(str(error)) from error


class _Writer:
    def __init__(self) -> None:
        self.contents: list[Content] = []
        self._name = ""
        self._path: list[object] = []

    def root(self, name: str, value: object) -> object:
        self._name = name
        self._path.clear()
        return self._tree(value)

    def _tree(self, value: object) -> object:
        kind = type(value)
        if kind is float or kind is bool or value is None:
            return value
        if kind in _SCALARS:
            return self._scalar(value)
        if kind in _KINDS:
            return self._container(_KINDS[kind], value)
        if _is_numpy(value):
            return self._array(value)
        if _is_torch(value):
            return self._torch(value)
        raise self._refused(f"is {a_kind(value)}", advice(value))

    def _scalar(self, value: object) -> object:
        if isinstance(value, int) and value not in _NATIVE_INTEGERS:
            return ["int", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, bytes) and len(value) > _LONG:
            return self._beside(["bytes"], value)
        if isinstance(value, str) and (len(value) > _LONG or not value.isascii()):
            # A text with half a surrogate pair has no UTF-8 form, and Python allows it.
            return self._beside(["text"], value.encode("utf-8", "surrogatepass"))
        return value

    def _container(self, kind: str, value: Any) -> object:
        if len(self._path) >= MOST_DEPTH:
            raise self._refused(
                f"is nested more than {MOST_DEPTH} deep, or holds itself", "Make it flatter, then try again."
            )
        tree: list[object] = [kind]
        self._path.append(None)
        for place, item in value.items() if kind in _MAPPINGS else enumerate(value):
            self._path[-1] = place
            if kind in _MAPPINGS:
                tree.append(self._key(place))
            tree.append(self._tree(item) if kind not in ("set", "frozenset") else self._key(item))
        self._path.pop()
        return tree

    def _key(self, key: object) -> object:
        """Encode a key of a mapping or a set. A tensor is found by identity only, so it is rejected."""
        parts: list[Any] = [key]
        while parts:
            part = parts.pop()
            if _torch() is not None and isinstance(part, _torch().Tensor):
                raise self._refused("is a tensor where a key must be", "Use numbers or texts as keys.")
            parts += part if type(part) in (tuple, frozenset) else ()
        return self._tree(key)

    def _array(self, value: Any) -> object:
        if _PLAIN_DTYPE.fullmatch(value.dtype.str) is None:
            raise self._refused(
                f"is {a_kind(value)} of {value.dtype}", "Convert it to a number type that every machine has."
            )
        if type(value) is not np.ndarray:
            return ["scalar", value.dtype.str, value.tobytes()]
        order = _order(value.strides)
        if not value.transpose(order).flags.c_contiguous:
            order = list(range(value.ndim))
        flat = np.ascontiguousarray(value.transpose(order)).reshape(-1)
        content = flat.view(np.uint8).data if value.nbytes else b""
        return self._beside(["array", value.dtype.str, list(value.shape), order], content)

    def _torch(self, value: Any) -> object:
        from barnraise.checkpoint.serialization import tensor_bytes  # it imports torch

        torch = _torch()
        if isinstance(value, torch.dtype):
            return ["dtype", _name(value)]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, torch.Size):
            return ["size", *value]
        if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            layout = "without data" if value.is_meta else f"of layout {_name(value.layout)}"
            layout = f"of type {_name(value.dtype)}" if value.is_quantized else layout
            raise self._refused(f"is a tensor {layout}", "Make it an ordinary one first: to_dense().")
        order = _order(value.stride())
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        if not plain.permute(order).is_contiguous():
            order = list(range(plain.dim()))
        kind = "tensor" if type(value) is torch.Tensor else "parameter"
        learns = value.requires_grad and value.is_leaf
        return self._beside(
            [kind, _name(value.dtype), list(value.shape), order, learns], tensor_bytes(plain.permute(order))
        )

    def _beside(self, tree: list[object], content: Content) -> object:
        self.contents.append(content)
        return tree

    def _refused(self, why: str, hint: str) -> RunError:
        path = "".join(f"[{repr(step)[:60]}]" for step in self._path[:8])
        return RunError(f"{self._name}{path} {why}, which does not travel", hint=hint)


class _Reader:
    """Reader of a document; raises ValueError and its like for anything the writer would not write."""

    def __init__(self, contents: memoryview, sizes: Iterator[int]) -> None:
        self._contents = contents
        self._sizes = sizes
        self._at = 0

    def has_more(self) -> bool:
        return next(self._sizes, None) is not None

    def value(self, tree: Any, depth: int = 0) -> Any:
        if type(tree) in _SCALARS:
            return tree
        if type(tree) is not list or not tree or type(tree[0]) is not str or depth > MOST_DEPTH:
            raise ValueError("its head is malformed")
        kind, parts = tree[0], tree[1:]
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.value(part, depth + 1) for part in parts)
        if kind in _MAPPINGS:
            made = _MAPPINGS[kind]()
            for key, item in zip(parts[::2], parts[1::2], strict=True):
                # Not in one expression: the contents must be used in the order in which they were written.
                known = self.value(key, depth + 1)
                made[known] = self.value(item, depth + 1)
            return made
        return self._leaf(kind, parts)

    def _leaf(self, kind: str, parts: list[Any]) -> Any:
        match kind, parts:
            case "int", [bytes(data)]:
                return int.from_bytes(data, "little", signed=True)
            case "complex", [float(real), float(imaginary)]:
                return complex(real, imaginary)
            case "bytes", []:
                return bytes(self._content())
            case "text", []:
                return bytes(self._content()).decode("utf-8", "surrogatepass")
            case "scalar", [str(dtype), bytes(data)]:
                return np.ndarray((), _plain_dtype(dtype), data)[()]
            case "array", [str(dtype), list(shape), list(order)]:
                return self._array(_plain_dtype(dtype), _checked(shape), order)
            case (("tensor" | "parameter"), [str(dtype), list(shape), list(order), bool(learns)]):
                return self._tensor(kind, dtype, _checked(shape), order, learns)
            case "dtype", [str(name)]:
                return _dtype(name)
            case "device", [str(name)]:
                import torch

                return torch.device(name)
            case "size", sizes:
                import torch

                return torch.Size(_checked(sizes))
        raise ValueError(f"it holds {kind[:40]!r}, which this version does not know")

    def _array(self, dtype: np.dtype[Any], shape: list[int], order: list[int]) -> Any:
        data = self._content(prod(shape) * dtype.itemsize)
        stored = np.ndarray([shape[axis] for axis in _places(order, shape)], dtype, bytearray(data))
        return stored.transpose(_inverse(order))

    def _tensor(self, kind: str, name: str, shape: list[int], order: list[int], learns: bool) -> Any:
        import torch

        from barnraise.checkpoint.serialization import tensor_from_bytes

        dtype = _dtype(name)
        data = self._content(prod(shape) * dtype.itemsize)
        stored = tensor_from_bytes(data, dtype, [shape[axis] for axis in _places(order, shape)])
        tensor = stored.permute(_inverse(order))
        return torch.nn.Parameter(tensor, learns) if kind == "parameter" else tensor.requires_grad_(learns)

    def _content(self, expected: int | None = None) -> memoryview:
        size = next(self._sizes, None)
        if size is None or (expected is not None and size != expected):
            raise ValueError("a content has another size than its head says")
        self._at += size
        return self._contents[self._at - size : self._at]


def a_kind(value: object) -> str:
    """Return the kind of a value with its article, such as ``a Linear`` or ``an Adam``."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def advice(value: object) -> str:
    """Return a hint for a value that cannot be sent."""
    if hasattr(value, "state_dict"):
        return "Pass its state_dict(), and build it inside the function."
    if isinstance(value, dict | list | tuple | set | str | int | float):
        return "Convert it to a plain dict, list, tuple, text or number first."
    if callable(value):
        return "Define it with def or class in the same file or notebook, and use it by its name."
    return "Pass plain data, arrays or tensors, and create everything else inside the function."


def _is_numpy(value: object) -> bool:
    return type(value) is np.ndarray or isinstance(value, np.generic)


def _is_torch(value: object) -> bool:
    torch = _torch()
    if torch is None:
        return False
    kinds = (torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device)
    return type(value) in kinds


def _torch() -> Any:
    """Return torch if the process has imported it: otherwise no value can be a tensor."""
    return sys.modules.get("torch")


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no type {name[:40]!r}")
    return dtype


def _plain_dtype(text: str) -> np.dtype[Any]:
    if _PLAIN_DTYPE.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is not a plain type")
    return np.dtype(text)


def _order(strides: Sequence[int]) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _places(order: Sequence[int], shape: Sequence[int]) -> Sequence[int]:
    if sorted(order) != list(range(len(shape))):
        raise ValueError("an array's dimensions are in no order")
    return order


def _checked(shape: list[Any]) -> list[int]:
    if len(shape) > _MOST_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("an array has an impossible shape")
    return shape


def _unsound(why: str) -> ShippingError:
    return ShippingError(
        f"the data of the run cannot be read: {why[:200]}",
        hint="Run it again; if it repeats, install the same Barnraise and torch on all machines.",
    )
