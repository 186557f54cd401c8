"""Results of a map in a file: what survives a death, and what is not believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from barnraise.core.errors import ProtocolError
from barnraise.training.mapping.result_store import ResultStore, items_of_bitmap

PRINT = b"items"


def filled(path: Path | None) -> ResultStore:
    store = ResultStore(20, PRINT, path)
    for item in (3, 0, 17):
        store.add(item, b"result %d" % item)
    return store


@pytest.mark.parametrize("is_kept", [False, True])
def test_store_returns_what_was_added_first(tmp_path: Path, is_kept: bool) -> None:
    store = filled(tmp_path / "deep" / "1.results" if is_kept else None)
    store.add(3, b"another result")
    assert [store.content(item) for item in (0, 3, 17)] == [b"result 0", b"result 3", b"result 17"]
    assert items_of_bitmap(store.to_bitmap(), 20) == [0, 3, 17]
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
    assert items_of_bitmap(again.to_bitmap(), 20) == [0, 3]
    again.add(17, b"new")
    again.close()
    assert ResultStore(20, PRINT, path).content(17) == b"new"


def test_damaged_record_is_dropped_with_all_that_follow(tmp_path: Path) -> None:
    path = tmp_path / "results"
    filled(path).close()
    content = bytearray(path.read_bytes())
    content[content.index(b"result 0")] ^= 1
    path.write_bytes(content)
    assert items_of_bitmap(ResultStore(20, PRINT, path).to_bitmap(), 20) == [3]


@pytest.mark.parametrize(("total", "items"), [(20, b"other items"), (21, PRINT)])
def test_file_of_other_items_is_not_read(tmp_path: Path, total: int, items: bytes) -> None:
    filled(tmp_path / "results").close()
    assert len(ResultStore(total, items, tmp_path / "results")) == 0


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
        items_of_bitmap(bytes(4), 20)
