"""Packing of folders: ignore files, links, limits and changes, compared with git itself."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.artifacts import PIECE, ArtifactStore, FolderLimits, changed_since, pack
from barnraise.artifacts.packing import pack as pack_module
from barnraise.artifacts.packing.ignore_rules import walk
from barnraise.core.errors import ShippingError

LIMITS = FolderLimits(most_bytes=1 << 30, most_files=1000)
needs_links = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")


def make(folder: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def shipped(folder: Path, *, everything: bool = False) -> set[str]:
    return {file.path for file in walk(folder, everything=everything)}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def test_nested_ignore_files_apply(tmp_path: Path) -> None:
    folder = make(
        tmp_path / "w",
        {
            ".gitignore": "*.log\n/build/\n!keep.log\ndata\n",
            "a.py": "",
            "x.log": "",
            "keep.log": "",
            "build/x": "",
            "sub/build/x": "",
            "sub/.gitignore": "!*.log\n*.tmp\n",
            "sub/y.log": "",
            "sub/z.tmp": "",
            "z.tmp": "",
            "data/d": "",
            ".git/config": "",
            "sub/.git": "",
            "__pycache__/a.pyc": "",
            "sub/__pycache__/a.pyc": "",
            ".venv/x": "",
            "venv/x": "",
            "node_modules/x": "",
            "barnraise-runs/x": "",
        },
    )
    expected = {".gitignore", "a.py", "keep.log", "sub/.gitignore", "sub/build/x", "sub/y.log", "z.tmp"}
    assert shipped(folder) == expected
    (folder / ".barnraiseignore").write_text("z.tmp\n!data/\n")
    assert shipped(folder) == (expected - {"z.tmp"}) | {".barnraiseignore", "data/d"}
    assert {"x.log", "build/x", "data/d"} <= shipped(folder, everything=True)
    assert "z.tmp" not in shipped(folder, everything=True)


def test_ignore_rules_of_repository_above_apply(tmp_path: Path) -> None:
    make(tmp_path, {"r/.git/HEAD": "", "r/.gitignore": "*.pt\nscratch/\n", "r/exp/.gitignore": "*.npy"})
    folder = make(tmp_path / "r" / "exp" / "one", {"a.py": "", "m.pt": "", "x.npy": "", "scratch/x": ""})
    assert shipped(folder) == {"a.py"}
    # A command typed inside a folder that git ignores still ships that folder.
    scratch = make(tmp_path / "r" / "scratch", {"a.py": "", "m.pt": ""})
    assert shipped(scratch) == {"a.py", "m.pt"}


_PATTERNS = (
    "*.a !x.a /p p/ q !q p/q /* !/p !p/ **/x.a p/** x* #no \\!x p/* !p/q/ [xy].a ?.b !*.b * !*/ p/**/x.b "
    "**/q/** !p/** ** /** !**/z **/p/ !/p/q"
)
_lines = st.lists(st.sampled_from(_PATTERNS.split()), max_size=4)


@pytest.mark.skipif(shutil.which("git") is None, reason="compared with git")
def test_walk_returns_same_files_as_git(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    for parent in ("", "p/", "p/q/", "q/", "r/p/"):
        make(folder, {parent + name: "" for name in ("x.a", "y.a", "x.b", "z")})
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)

    @given(_lines, _lines, _lines)
    @settings(max_examples=100, deadline=None)
    def compare(top: list[str], p: list[str], q: list[str]) -> None:
        for place, lines in (("", top), ("p", p), ("p/q", q)):
            (folder / place / ".gitignore").write_text("\n".join(lines) + "\n")
        command = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout
        assert shipped(folder) == {path.decode() for path in listed.split(b"\0") if path}

    compare()


@needs_links
def test_links_inside_folder_are_shipped_as_content(tmp_path: Path, store: ArtifactStore) -> None:
    folder = make(tmp_path / "w", {"a.txt": "content", "d/b.txt": "deep"})
    (folder / "link.txt").symlink_to("a.txt")
    (folder / "again").symlink_to("d")
    packed = pack(folder, store, LIMITS)
    store.unpack(packed.manifest, tmp_path / "out")
    assert (tmp_path / "out" / "link.txt").read_text() == "content"
    assert (tmp_path / "out" / "again" / "b.txt").read_text() == "deep"
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert len(packed.manifest.objects()) == 2


@needs_links
@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("out", "../secret", "leads out"),
        ("far", "/etc/passwd", "leads out"),
        ("sub/loop", "..", "leads back"),
        ("self", ".", "leads back"),
        ("nowhere", "missing", "leads nowhere"),
    ],
)
def test_links_outside_folder_are_rejected_by_name(
    tmp_path: Path, store: ArtifactStore, name: str, target: str, words: str
) -> None:
    make(tmp_path, {"secret": "s"})
    folder = make(tmp_path / "w", {"a": "", "sub/b": ""})
    (folder / name).symlink_to(target)
    with pytest.raises(ShippingError, match=words) as caught:
        pack(folder, store, LIMITS)
    assert repr(name) in caught.value.message
    (folder / ".barnraiseignore").write_text(f"/{name}\n")
    assert pack(folder, store, LIMITS).files == 3


@needs_links
def test_links_that_form_a_loop_are_rejected(tmp_path: Path, store: ArtifactStore) -> None:
    folder = make(tmp_path / "w", {"a/x": "", "b/y": ""})
    (folder / "a" / "to_b").symlink_to("../b")
    (folder / "b" / "to_a").symlink_to("../a")
    with pytest.raises(ShippingError, match="leads back"):
        pack(folder, store, LIMITS)


@needs_links
def test_special_files_are_left_out_without_blocking(tmp_path: Path, store: ArtifactStore) -> None:
    folder = make(tmp_path / "w", {"a": "x"})
    os.mkfifo(folder / "pipe")
    assert pack(folder, store, LIMITS).files == 1


def test_size_limit_error_names_largest_files(tmp_path: Path, store: ArtifactStore) -> None:
    folder = make(tmp_path / "w", {f"many/deep/{number}": "x" for number in range(30)} | {"a.py": "x"})
    (folder / "big.bin").write_bytes(bytes(100_000))
    with pytest.raises(ShippingError) as caught:
        pack(folder, store, FolderLimits(most_bytes=50_000, most_files=1000))
    assert "big.bin" in caught.value.message.splitlines()[1]
    with pytest.raises(ShippingError, match="32 files") as caught:
        pack(folder, store, FolderLimits(most_bytes=1 << 30, most_files=20))
    assert "30 files  many/deep/" in caught.value.message.splitlines()[1]
    assert list(store.manifests.iterdir()) == []


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="such names cannot be made there")
def test_unportable_names_raise_with_list(tmp_path: Path, store: ArtifactStore) -> None:
    folder = make(tmp_path / "w", {"a.py": "", "A.py": "", "aux.txt": "", "t:x": ""})
    with pytest.raises(ShippingError) as caught:
        pack(folder, store, LIMITS)
    for name in ("'A.py'", "'aux.txt'", "'t:x'"):
        assert name in caught.value.message


def test_unchanged_files_are_not_hashed_again(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "w", {"a": "x", "b": "y"})
    (folder / "big").write_bytes(random.Random(1).randbytes(2 * PIECE + 5))
    long_ago = 1_000_000_000
    for name in ("a", "b", "big"):
        os.utime(folder / name, (long_ago, long_ago))
    monkeypatch.setattr("barnraise.artifacts.packing.hash_cache._SETTLED_NS", -(10**12))
    first = pack(folder, store, LIMITS)
    read: list[str] = []
    real = pack_module._hash_and_keep
    monkeypatch.setattr(
        pack_module, "_hash_and_keep", lambda file, kept: (read.append(file.path), real(file, kept))[1]
    )
    assert pack(folder, store, LIMITS) == first
    assert read == []
    (folder / "a").write_text("z")
    os.utime(folder / "a", (long_ago, long_ago))  # same size and time, but the disk notes the change
    assert pack(folder, store, LIMITS).id != first.id
    assert read == ["a"]
    read.clear()
    store.object_path(first.manifest.files[1].object).unlink()  # lost from the store: it must come back
    pack(folder, store, LIMITS)
    assert "b" in read


def test_broken_hash_cache_only_costs_time(tmp_path: Path, store: ArtifactStore) -> None:
    folder = make(tmp_path / "w", {"a": "x"})
    (store.directory / "hashes.db").write_bytes(b"this is no database" * 100)
    assert pack(folder, store, LIMITS).files == 1


def test_file_that_grows_while_packed_is_named(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "w", {"log": "x"})
    (folder / "log").write_bytes(bytes(PIECE + 1))
    real = pack_module.piece_hash

    def grow(data: bytes) -> bytes:
        with open(folder / "log", "ab") as file:
            file.write(b"more")
        return real(data)

    monkeypatch.setattr(pack_module, "piece_hash", grow)
    with pytest.raises(ShippingError, match="'log' changed"):
        pack(folder, store, LIMITS)
    assert list(store.partial.iterdir()) == []


def test_pack_only_packs_named_files(tmp_path: Path, store: ArtifactStore) -> None:
    folder = make(tmp_path / "w", {"a": "x", "d/b": "y", ".gitignore": "*", "c": "z"})
    assert [entry.path for entry in pack(folder, store, LIMITS, only=["d/b", "a"]).manifest.files] == [
        "a",
        "d/b",
    ]
    for bad in ("../w/a", "/etc/passwd", "missing", "d"):
        with pytest.raises(ShippingError):
            pack(folder, store, LIMITS, only=[bad])


def test_changed_since_returns_new_and_changed_files(tmp_path: Path, store: ArtifactStore) -> None:
    folder = make(tmp_path / "w", {"a.py": "x", "same": "y", "gone": "g", ".gitignore": "*.pt"})
    packed = pack(folder, store, LIMITS)
    ran = tmp_path / "run"
    store.unpack(packed.manifest, ran)
    assert changed_since(packed.manifest, ran, LIMITS) == []
    make(ran, {"a.py": "z", "out/model.pt": "m", "__pycache__/a.pyc": "c"})
    (ran / "gone").unlink()
    if sys.platform != "win32":
        (ran / "link").symlink_to("/etc")
        (ran / "file").symlink_to("/etc/passwd")
    assert changed_since(packed.manifest, ran, LIMITS) == ["a.py", "out/model.pt"]
    with pytest.raises(ShippingError, match="model"):
        changed_since(packed.manifest, ran, FolderLimits(most_bytes=1, most_files=10))
