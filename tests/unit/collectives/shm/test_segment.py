"""Shared memory segments, with the branch for macOS run on this system where it has POSIX segments."""

from __future__ import annotations

import os
import sys

import pytest

from barnraise.collectives.shm import segment as segment_module
from barnraise.collectives.shm.segment import SharedSegment

posixshmem = pytest.importorskip("_posixshmem", reason="POSIX segments")
_LONGEST_NAME_OF_MACOS = 31
_LARGEST_PID_OF_MACOS = 99_998


def test_segment_of_macos_is_shared_by_its_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def open_noting_name(name: str, flags: int, mode: int) -> int:
        names.append(name)
        descriptor: int = posixshmem.shm_open(name, flags, mode=mode)
        return descriptor

    class Noting:
        shm_open = staticmethod(open_noting_name)
        shm_unlink = staticmethod(posixshmem.shm_unlink)

    monkeypatch.setattr(segment_module.sys, "platform", "darwin")
    monkeypatch.setattr(os, "getpid", lambda: _LARGEST_PID_OF_MACOS)
    monkeypatch.setitem(sys.modules, "_posixshmem", Noting)
    created = SharedSegment.create(8192)
    attached = SharedSegment.attach(8192, os.dup(created.descriptor), "")
    created.view[:4] = b"grad"
    assert bytes(attached.view[:4]) == b"grad"
    (name,) = names
    assert len(name) <= _LONGEST_NAME_OF_MACOS
    with pytest.raises(FileNotFoundError):
        posixshmem.shm_open(name, os.O_RDWR, mode=0o600)
    attached.close()
    created.close()


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors")
def test_segment_that_is_smaller_than_announced_is_rejected() -> None:
    created = SharedSegment.create(4096)
    with pytest.raises(ValueError, match="smaller"):
        SharedSegment.attach(8192, os.dup(created.descriptor), "")
    created.close()
