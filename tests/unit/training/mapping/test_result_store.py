"""Results of a map in a file: what survives a death, and what is not believed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from barnraise.core.errors import ProtocolError
from barnraise.training.mapping.result_store import ResultStore, bits_of_bitmap

PRINT = b"items"


def filled(path: Path | None) -> ResultStore:
    store = ResultStore(20, PRINT, path)
    for item in (3, 0, 17):
        store.add(item, b"result %d" % item)
    return store


def items(store: ResultStore) -> list[int]:
    """Return the items whose results the store has."""
    return bits_of_bitmap(store.to_bitmap(), store.total).nonzero()[0].tolist()


@pytest.mark.parametrize("is_kept", [False, True])
def test_store_returns_what_was_added_first(tmp_path: Path, is_kept: bool) -> None:
    store = filled(tmp_path / "deep" / "1.results" if is_kept else None)
    store.add(3, b"another result")
    assert [store.content(item) for item in (0, 3, 17)] == [b"result 0", b"result 3", b"result 17"]
    assert items(store) == [0, 3, 17]
    assert len(store) == 3
    assert not store.is_complete


def test_file_is_read_again_with_its_results(tmp_path: Path) -> None:
    first = filled(tmp_path / "results")
    first.close()
    again = ResultStore(20, PRINT, tmp_path / "results")
    assert again.content(17) == b"result 17"
    assert again.digest() == first.digest()
    again.add(5, b"more")
    again.close()
    assert ResultStore(20, PRINT, tmp_path / "results").content(5) == b"more"


@pytest.mark.parametrize("cut", [1, 8, 30, 56])  # the last record has 57 bytes
def test_record_that_was_cut_short_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results"
    filled(path).close()
    path.write_bytes(path.read_bytes()[:-cut])
    again = ResultStore(20, PRINT, path)
    assert items(again) == [0, 3]
    again.add(17, b"new")
    again.close()
    assert ResultStore(20, PRINT, path).content(17) == b"new"


def test_damaged_record_is_dropped_with_all_that_follow(tmp_path: Path) -> None:
    path = tmp_path / "results"
    filled(path).close()
    content = bytearray(path.read_bytes())
    content[content.index(b"result 0")] ^= 1
    path.write_bytes(content)
    assert items(ResultStore(20, PRINT, path)) == [3]


@pytest.mark.parametrize(("total", "items"), [(20, b"other items"), (21, PRINT)])
def test_file_of_other_items_is_not_read(tmp_path: Path, total: int, items: bytes) -> None:
    filled(tmp_path / "results").close()
    assert len(ResultStore(total, items, tmp_path / "results")) == 0


@pytest.mark.parametrize("is_kept", [False, True])
def test_only_an_unconfirmed_result_is_replaced(tmp_path: Path, is_kept: bool) -> None:
    path = tmp_path / "results" if is_kept else None
    store, expected = filled(path), ResultStore(20, PRINT)
    store.confirm([0])
    for item in (0, 3, 5):
        store.replace(item, b"of another worker")
    for item, content in ((0, b"result 0"), (3, b"of another worker"), (17, b"result 17")):
        expected.add(item, content)
    expected.add(5, b"of another worker")
    assert store.digest() == expected.digest()
    assert [store.content(item) for item in (0, 3, 5)] == [b"result 0", *[b"of another worker"] * 2]
    assert bits_of_bitmap(store.confirmed_bitmap(), 20).nonzero()[0].tolist() == [0]
    if path is not None:
        store.close()
        again = ResultStore(20, PRINT, path)
        assert again.digest() == expected.digest()
        assert again.content(3) == b"of another worker"
        assert not any(again.confirmed_bitmap()), "others may have computed these items again"


@pytest.mark.skipif(sys.platform == "win32", reason="the process kills itself with SIGKILL")
def test_results_survive_a_kill_of_the_process(tmp_path: Path) -> None:
    words = (
        "import os, sys, pathlib; from barnraise.training.mapping.result_store import ResultStore\n"
        "store = ResultStore(20, b'items', pathlib.Path(sys.argv[1]))\n"
        "for item in range(12): store.add(item, b'x' * 1000 * item)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", words, str(tmp_path / "results")], check=False, timeout=120)
    assert done.returncode == -9
    store = ResultStore(20, PRINT, tmp_path / "results")
    assert items(store) == list(range(12))
    assert store.content(11) == b"x" * 11_000


def test_digest_does_not_depend_on_the_order() -> None:
    first, second, different = (ResultStore(20, PRINT) for _ in range(3))
    first.add(1, b"a")
    first.add(2, b"b")
    second.add(2, b"b")
    second.add(1, b"a")
    different.add(1, b"b")
    different.add(2, b"a")
    assert first.digest() == second.digest() != different.digest()


def test_item_that_the_map_does_not_have_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a result of item 20"):
        ResultStore(20, PRINT).add(20, b"")
    with pytest.raises(ProtocolError, match="does not fit the map"):
        bits_of_bitmap(bytes(4), 20)
