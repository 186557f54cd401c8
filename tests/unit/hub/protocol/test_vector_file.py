"""Vector files: any codec and any chunk size; files that do not fit are refused."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import HubError, ProtocolError
from barnraise.hub.protocol.vector_file import (
    MAGIC,
    VectorFile,
    VectorForm,
    add_vector,
    check_codec,
    encode_vector,
)


def _file(folder: Path, flat: torch.Tensor, form: VectorForm, residual: torch.Tensor | None = None) -> Path:
    sink = io.BytesIO()
    encode_vector(sink, flat, form, residual)
    path = folder / "vector"
    path.write_bytes(sink.getvalue())
    return path


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk:k=8,block=64", "int8+zlib"])
@pytest.mark.parametrize("numel", [1, 1024, 2500])
def test_encoded_vector_is_read_again(codec: str, numel: int, tmp_path: Path) -> None:
    form = VectorForm(numel, 1024, codec, 3)
    torch.manual_seed(0)
    flat, residual = torch.randn(numel), torch.zeros(numel)
    path = _file(tmp_path, flat, form, residual)
    assert path.stat().st_size <= form.max_bytes
    decoded = torch.zeros(numel)
    add_vector(path, form, decoded)
    assert torch.allclose(decoded + residual, flat, atol=1e-6), "what is missing is in the residual"
    if codec == "fp32":
        assert torch.equal(decoded, flat)
    add_vector(path, form, decoded, is_base=True)
    file = VectorFile(path, form)
    assert torch.equal(torch.cat([file.chunk(index) for index in range(form.count)]), decoded)


def test_vector_files_of_other_form_are_refused(tmp_path: Path) -> None:
    form = VectorForm(3000, 1024, "int8", 0)
    path = _file(tmp_path, torch.randn(3000), form)
    good = path.read_bytes()
    for bad in (
        b"",
        good[:-1],
        good + b"x",
        b"PK" + good[2:],
        good[:8] + b"\xff\xff\xff\xff" + good[12:],
        MAGIC + bytes(4 * form.count),
    ):
        path.write_bytes(bad)
        with pytest.raises(ProtocolError) as caught:
            list(VectorFile(path, form).chunks())
        assert not caught.value.not_finite
    path.write_bytes(good)
    with pytest.raises(ProtocolError):
        list(VectorFile(path, VectorForm(2999, 1024, "int8", 0)).chunks())


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_invalid_bytes_raise_protocol_error(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vector"
        for content in (data, MAGIC + data):
            path.write_bytes(content)
            with pytest.raises(ProtocolError):
                list(VectorFile(path, VectorForm(1500, 1024, "int8", 0)).chunks())


@pytest.mark.parametrize(
    ("codec", "place"), [("fp32", -4), ("int8", len(MAGIC) + 4), ("topk", len(MAGIC) + 4)]
)
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, codec: str, place: int) -> None:
    form = VectorForm(64, 1024, codec, 0)
    path = _file(tmp_path, torch.ones(64), form)
    data = bytearray(path.read_bytes())
    data[place : place + 4 or None] = b"\x00\x00\xc0\x7f"
    path.write_bytes(data)
    with pytest.raises(ProtocolError) as caught:
        list(VectorFile(path, form).chunks())
    assert caught.value.not_finite


def test_codecs_that_need_all_members_are_refused() -> None:
    check_codec("int8")
    check_codec("fp32")
    for name in ("powersgd", "zip"):
        with pytest.raises(HubError):
            check_codec(name)
