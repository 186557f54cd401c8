"""Shared memory segment, with one small branch per operating system. Torch-free.

* Linux: an anonymous memory file.
* macOS: a POSIX segment whose name is removed at once.
* Windows: a named mapping.

No segment outlives the two processes.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys


class SharedSegment:
    """A mapped segment; ``descriptor`` (POSIX) or ``name`` (Windows) lets the other process map it."""

    def __init__(self, size: int, descriptor: int, name: str, mapping: mmap.mmap) -> None:
        self.size = size
        self.descriptor = descriptor
        self.name = name
        self.mapping = mapping
        self.view = memoryview(mapping)

    @classmethod
    def create(cls, size: int) -> SharedSegment:
        if sys.platform == "win32":
            name = f"barnraise-{os.getpid()}-{secrets.token_hex(8)}"
            return cls(size, -1, name, mmap.mmap(-1, size, tagname=name))
        descriptor = _anonymous_file()
        os.ftruncate(descriptor, size)
        return cls(size, descriptor, "", mmap.mmap(descriptor, size))

    @classmethod
    def attach(cls, size: int, descriptor: int, name: str) -> SharedSegment:
        """Map a segment that the other process created. This takes ownership of the descriptor."""
        if sys.platform == "win32":
            return cls(size, -1, name, mmap.mmap(-1, size, tagname=name))
        if os.fstat(descriptor).st_size < size:
            os.close(descriptor)
            raise ValueError("a shared segment is smaller than announced")
        segment = cls(size, -1, "", mmap.mmap(descriptor, size))
        os.close(descriptor)
        return segment

    def close_descriptor(self) -> None:
        """Close our descriptor once the other process has its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        self.close_descriptor()
        self.view.release()
        try:
            self.mapping.close()
        except BufferError:
            pass  # a view is still in use; the mapping is freed with it


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("barnraise", os.MFD_CLOEXEC)
    else:  # macOS: what multiprocessing.shared_memory uses
        import _posixshmem  # type: ignore[import-not-found]

        name = f"/by{os.getpid()}{secrets.token_hex(6)}"
        descriptor: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        _posixshmem.shm_unlink(name)
        return descriptor
