"""Manifests from untrusted bytes, and portable names."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.artifacts import (
    PIECE,
    FileEntry,
    FolderLimits,
    FolderManifest,
    decode_manifest,
    encode_manifest,
)
from barnraise.artifacts.packing.portable_names import folded, name_problems, why_unusable
from barnraise.artifacts.store.manifest import MOST_ENCODED, MOST_FILES, make_manifest
from barnraise.artifacts.transfer import messages
from barnraise.core.errors import ProtocolError, ShippingError
from tests.unit.changed_bytes import changed, read_or_refused
from tests.unit.processor_time import least_cpu_s

LIMITS = FolderLimits(most_bytes=1 << 33, most_files=1000)
ONE = bytes(range(32))


@pytest.mark.parametrize(
    "path",
    [
        *[
            "../a",
            "/a",
            "a//b",
            "a/./b",
            "a/../b",
            "",
            ".",
            "..",
            "a/",
            "C:/a",
            "a\\b",
            "..\\a",
            "\\\\host\\a",
        ],
        *["CON", "con", "aux.txt", "sub/NUL.tar.gz", "com1", "LPT9.log", "COM¹", "nul .txt", "conin$", "a:b"],
        *["dot.", "space ", "a/b./c", "a<b", "a>b", "a|b", "a?b", "a*b", 'a"b', "a\nb", "a\0b", "a\x7fb"],
        *["x" * 256, "é" * 128, "/".join("x" * 70), "/".join(["y" * 200] * 6), "bad\udcff"],
    ],
)
def test_path_that_some_machine_cannot_hold_is_unusable(path: str) -> None:
    assert why_unusable(path) is not None
    data = msgspec.msgpack.encode([[["PATH", 1, False, [ONE]]]])
    encoded = path.encode(errors="surrogateescape")
    data = data.replace(b"\xa4PATH", b"\xda" + len(encoded).to_bytes(2, "big") + encoded)
    with pytest.raises(ShippingError):
        decode_manifest(data, LIMITS)


@pytest.mark.parametrize(
    "path", ["a", "a/b.txt", ".env", "console.py", "comma", "com10", "ü/é", "a b", "x" * 255]
)
def test_path_that_all_machines_can_hold_is_usable(path: str) -> None:
    assert why_unusable(path) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [("a.py", "A.py"), ("é", "e\u0301"), ("straße", "STRASSE"), ("d/x", "D/y"), ("a", "a/b"), ("A", "a/b")],
)
def test_names_that_collide_somewhere(first: str, second: str) -> None:
    (problem,) = name_problems([first, second])
    assert repr(first.split("/")[0])[1:-1] in problem or repr(second)[1:-1] in problem


@settings(deadline=None)
@given(st.text(max_size=8), st.text(max_size=8))
def test_folded_form_is_stable(first: str, second: str) -> None:
    assert folded(folded(first)) == folded(first)
    if first.casefold() == second.casefold():
        assert folded(first) == folded(second)


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
entries = st.builds(
    lambda path, size, executable: FileEntry(path, size, executable, (ONE,) * -(-size // PIECE)),
    st.lists(names, min_size=1, max_size=3).map("/".join),
    st.integers(0, 3 * PIECE),
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(entries, max_size=6, unique_by=lambda entry: entry.path))
def test_decoded_manifest_equals_encoded_and_is_safe(files: list[FileEntry]) -> None:
    manifest = make_manifest(files)
    data = encode_manifest(manifest)
    try:
        decoded = decode_manifest(data, LIMITS)
    except ShippingError:
        assert name_problems(entry.path for entry in files)
    else:
        assert decoded == manifest
        assert encode_manifest(decoded) == data
        assert all(earlier.path < later.path for earlier, later in pairwise(decoded.files))


_MANIFEST = FolderManifest((FileEntry("a", 1, False, (ONE,)), FileEntry("b/c", 0, True, ())))


@settings(deadline=None)
@given(st.binary(max_size=200) | changed([encode_manifest(_MANIFEST)]))
def test_manifest_with_changed_bytes_is_read_or_rejected(data: bytes) -> None:
    if read_or_refused(
        data, lambda encoded: decode_manifest(encoded, LIMITS), encode_manifest, ShippingError
    ):
        paths = [entry.path for entry in decode_manifest(data, LIMITS).files]
        assert paths == sorted(set(paths))
        assert not any(map(why_unusable, paths))
    try:
        messages.decode(data)
    except ProtocolError:
        pass


def entry(path: str, size: int = 1, pieces: tuple[bytes, ...] = (ONE,)) -> FileEntry:
    return FileEntry(path, size, False, pieces)


@pytest.mark.parametrize(
    "bad",
    [
        [entry("b"), entry("a")],
        [entry("a"), entry("a")],
        [entry("a", PIECE + 1)],
        [entry("a", 0)],
        [entry("a", 1, ())],
        [entry("a", 1, (b"short",))],
        [entry("a", -1)],
        [entry("a", 1 << 62)],
        [entry("a", 1 << 40, (ONE,) * (1 << 18))],
        [entry("a"), entry("A")],
    ],
)
def test_manifest_with_impossible_sizes_is_rejected(bad: list[FileEntry]) -> None:
    with pytest.raises(ShippingError):
        decode_manifest(msgspec.msgpack.encode(FolderManifest(tuple(bad))), LIMITS)


def test_manifest_of_million_files_is_rejected_at_once() -> None:
    data = msgspec.msgpack.encode([[["a", 0, False, []]] * 1_000_000])

    def refused() -> None:
        with pytest.raises(ShippingError):
            decode_manifest(data, LIMITS)

    assert least_cpu_s(refused) < 0.2


def test_too_many_files_are_counted() -> None:
    many = FolderManifest(tuple(entry(f"{number:06}") for number in range(MOST_FILES + 1)))
    with pytest.raises(ShippingError, match="50001 files"):
        encode_manifest(many)
    longest = FolderManifest(tuple(entry(f"{number:06}" + "x" * 240) for number in range(40_000)))
    with pytest.raises(ShippingError, match="40000 files"):
        encode_manifest(longest)
    with pytest.raises(ShippingError):
        decode_manifest(bytes(MOST_ENCODED + 1), LIMITS)


def test_object_hash_is_independent_of_file_name() -> None:
    first, second = entry("a"), FileEntry("b", 1, True, (ONE,))
    assert first.object == second.object
    assert first.object != entry("a", 2).object
    assert list(make_manifest([second, first, entry("c", 0, ())]).objects().values()) == [first]


def test_transfer_messages_are_bounded() -> None:
    name = messages.PieceName(ONE, 0)
    for bad in (
        messages.WantPieces((name,) * (messages.MOST_NAMES + 1), True),
        messages.PieceList((messages.PieceData(name, memoryview(bytes(PIECE + 1))),)),
        messages.WantPieces((messages.PieceName(b"short", 0),), True),
        messages.WantPieces((messages.PieceName(ONE, -1),), True),
    ):
        with pytest.raises(ProtocolError):
            messages.decode(messages.encode(bad))
    largest = messages.encode(messages.PieceList((messages.PieceData(name, memoryview(bytes(PIECE))),)))
    decoded = messages.decode(largest)
    assert isinstance(decoded, messages.PieceList)
    assert decoded.pieces[0].data.obj is largest  # a view, no copy
