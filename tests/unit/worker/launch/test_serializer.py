"""Plain data is restored as it was; other values are rejected by name; damaged bytes do no harm."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from barnraise.core.errors import RunError, ShippingError
from barnraise.worker.launch.serializer import MARK, MOST_HEAD, decode_values, encode_values
from tests.repository import ROOT

SOURCE = str(ROOT / "src")
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def encoded(value: object, name: str = "argument 1") -> bytes:
    return b"".join(encode_values([(name, value)]))


def round_trip(value: object) -> Any:
    (back,) = decode_values(encoded(value))
    return back


def same(first: Any, second: Any) -> bool:
    """Equal in type, in value and bit by bit; a NaN equals a NaN."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return (first == second and math.copysign(1, first) == math.copysign(1, second)) or (
            first != first != second
        )
    if isinstance(first, complex):
        return same(first.real, second.real) and same(first.imag, second.imag)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    return bool(first == second)


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(codec=None))  # half surrogates too
    | st.binary(max_size=3000)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=5).map(OrderedDict)
        | st.sets(keys, max_size=5)
    ),
    max_leaves=20,
)


@given(values)
def test_plain_values_come_back(value: object) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value", [2**63 - 1, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**4000, -0.0, math.inf, "é" * 2000]
)
def test_edge_values_are_restored(value: object) -> None:
    assert same(round_trip(value), value)


plain_dtypes = (
    np_st.boolean_dtypes()
    | np_st.integer_dtypes()
    | np_st.unsigned_integer_dtypes()
    | np_st.floating_dtypes(sizes=(16, 32, 64))
    | np_st.complex_number_dtypes(sizes=(64, 128))
    | np_st.unicode_string_dtypes(max_len=4)
    | np_st.byte_string_dtypes(max_len=4)
    | np_st.datetime64_dtypes()
    | np_st.timedelta64_dtypes()
)
arrays = np_st.arrays(plain_dtypes, np_st.array_shapes(min_dims=0, min_side=0, max_side=4))


@given(arrays, st.booleans(), st.sampled_from([1, -1, 2]))
def test_arrays_come_back_with_their_order(array: np.ndarray, turned: bool, step: int) -> None:
    array = array.T if turned else array
    array = array[::step] if array.ndim else array
    back = round_trip(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable
    if step == 1:
        assert back.flags.f_contiguous == array.flags.f_contiguous


@given(arrays.filter(lambda array: array.size > 0))
def test_numpy_scalars_come_back(array: np.ndarray) -> None:
    scalar = array.reshape(-1)[0]
    back = round_trip(scalar)
    assert type(back) is type(scalar)
    assert back.tobytes() == scalar.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_tensor(dtype: torch.dtype) -> None:
    raw = torch.arange(1, 17, dtype=torch.uint8).repeat(max(1, dtype.itemsize // 16 + 1) * 4)
    tensor = raw.ne(0) if dtype is torch.bool else raw.view(dtype)
    back = round_trip(tensor)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    assert round_trip(dtype) is dtype


@given(
    st.lists(st.integers(0, 4), max_size=4), st.randoms(use_true_random=False), st.sampled_from([1, -1, 2])
)
def test_strides_of_tensors_are_restored(shape: list[int], random: Any, step: int) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.bfloat16).reshape(shape)
    axes = list(range(len(shape)))
    random.shuffle(axes)
    tensor = tensor.permute(axes)
    is_dense = step != 2 or not shape
    tensor = tensor if is_dense else tensor[::2]
    back = round_trip(tensor)
    assert back.dtype == torch.bfloat16
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)
    if is_dense and 0 not in shape and 1 not in shape:
        assert back.stride() == tensor.stride()


def test_tensor_attributes_are_restored() -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    leaf = torch.ones(2, requires_grad=True)
    back = round_trip([parameter, leaf, leaf * 2, torch.device("cuda:1"), torch.Size([2, 3])])
    assert type(back[0]) is torch.nn.Parameter
    assert not back[0].requires_grad
    assert back[1].requires_grad
    assert not back[2].requires_grad
    assert back[2].tolist() == [2.0, 2.0]
    assert back[3] == torch.device("cuda:1")
    assert type(back[4]) is torch.Size
    assert round_trip(torch.complex(torch.ones(2), torch.ones(2)).conj()).tolist() == [1 - 1j, 1 - 1j]
    assert round_trip(torch.ones(3, 1).expand(3, 2)).tolist() == [[1.0, 1.0]] * 3


def test_model_state_is_restored() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = round_trip(model.state_dict())
    assert type(state) is OrderedDict
    other.load_state_dict(state)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "where", "hint"),
    [
        (torch.nn.Linear(1, 1), "argument 1 is a Linear", "state_dict()"),
        ({"model": [torch.nn.Linear(1, 1)]}, "argument 1['model'][0] is a Linear", "state_dict()"),
        ((1, {2: open}), "argument 1[1][2] is a builtin_function", "def"),
        (Pair(1, 2), "argument 1 is a Pair", "plain"),
        (np.array([object()]), "argument 1 is a ndarray of object", "number type"),
        (np.zeros(2, "i4,f4"), "argument 1 is a ndarray of", "number type"),
        (np.zeros(2, np.longdouble), "argument 1 is a ndarray of", "number type"),
        (torch.eye(2).to_sparse(), "argument 1 is a tensor of layout sparse_coo", "to_dense()"),
        (torch.empty(2, device="meta"), "argument 1 is a tensor without data", "ordinary"),
        ({torch.ones(1): 1}, "is a tensor where a key must be", "keys"),
        ({(1, torch.ones(1))}, "is a tensor where a key must be", "keys"),
        (Path("x"), "argument 1 is a PosixPath", "plain data"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="names of paths and types differ")
def test_refusals_name_the_place(value: object, where: str, hint: str) -> None:
    with pytest.raises(RunError) as caught:
        encoded(value)
    assert where in caught.value.message
    assert hint in caught.value.hint


def test_nesting_and_sizes_are_bounded() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(RunError, match="holds itself"):
        encoded(endless)
    deep: list[object] = []
    for _ in range(99):
        deep = [deep]
    assert round_trip(deep) == deep
    with pytest.raises(RunError, match="numpy array or a tensor"):
        encoded(["x" * 1024] * (MOST_HEAD // 1024))


def document(head: object, contents: bytes = b"") -> bytes:
    data = msgspec.msgpack.encode(head)
    return MARK + len(data).to_bytes(8, "little") + data + contents


@pytest.mark.parametrize(
    "data",
    [
        b"",
        MARK,
        MARK + (1 << 60).to_bytes(8, "little"),
        document({}),
        document([[["list", ["nonsense"]]], []]),
        document([[[]], []]),
        document([[["dict", 1]], []]),
        document([[["set", ["list"]]], []]),
        document([[["bytes"]], []]),
        document([[["bytes"], ["bytes"]], [3]], b"abc"),  # one content for two values
        document([[None], [3]], b"abc"),
        document([[["bytes"]], [-1]]),
        document([[["bytes"]], [4]], b"abc"),
        document([[["array", "<f4", [2**40], [0]]], [4]], b"abcd"),
        document([[["array", "|O", [1], [0]]], [8]], b"abcdefgh"),
        document([[["array", "<f4", [-1, -1], [0, 1]]], [4]], b"abcd"),
        document([[["array", "<f4", [1], [5]]], [4]], b"abcd"),
        document([[["array", "<f4", [0, 2**62, 2**62], [0, 1, 2]]], [0]]),
        document([[["tensor", "int32", [1], [0], True]], [4]], b"abcd"),
        document([[["tensor", "load", [1], [0], False]], [4]], b"abcd"),
        document([[["dtype", "load"]], []]),
        document([[["device", "nowhere"]], []]),
    ],
)
def test_unsound_documents_are_refused(data: bytes) -> None:
    with pytest.raises(ShippingError):
        decode_values(data)


@settings(max_examples=300)
@given(values, st.data())
def test_damage_is_noticed_or_harmless(value: object, data: Any) -> None:
    whole = bytearray(encoded([value, np.arange(3), torch.arange(3)]))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_values(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    except ShippingError:
        pass


@pytest.mark.parametrize("make", [lambda: [1, "a", None], lambda: {"x": np.arange(3)}])
def test_torch_is_not_imported_for_plain_values(make: Callable[[], object], tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(encoded(make()))
    script = (
        "import sys; from barnraise.worker.launch.serializer import decode_values, encode_values\n"
        "value = decode_values(open(sys.argv[1], 'rb').read()); encode_values([('x', value)])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "data")], check=True, env={"PYTHONPATH": SOURCE}
    )
