"""Shared memory segments, with the branch for macOS run on this system where it has POSIX segments."""

from __future__ import annotations

import os
import socket
import subprocess
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


_ATTACH_AND_WRITE = """
import socket, sys
from barnraise.collectives.shm.segment import SharedSegment
channel = socket.socket(fileno=int(sys.argv[1]))
_, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
segment = SharedSegment.attach(8192, descriptors[0], "")
segment.view[:4] = b"grad"
segment.close()
"""


def test_descriptor_of_macos_segment_reaches_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as macos:
        macos.setattr(segment_module.sys, "platform", "darwin")
        created = SharedSegment.create(8192)
    near, far = socket.socketpair()
    command = [sys.executable, "-c", _ATTACH_AND_WRITE, str(far.fileno())]
    with near, far, subprocess.Popen(command, pass_fds=[far.fileno()]) as other:
        socket.send_fds(near, [b"!"], [created.descriptor])
        assert other.wait(timeout=60) == 0
    assert bytes(created.view[:4]) == b"grad"
    created.close()


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors")
def test_segment_that_is_smaller_than_announced_is_rejected() -> None:
    created = SharedSegment.create(4096)
    with pytest.raises(ValueError, match="smaller"):
        SharedSegment.attach(8192, os.dup(created.descriptor), "")
    created.close()
