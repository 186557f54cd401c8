"""Clones: files that share their blocks with another file until one of the two is written (reflinks)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from barnraise.core.files import create_file, discard

if sys.platform != "win32":
    import fcntl

_FICLONE = 0x40049409  # Linux: share all blocks of another file; btrfs, XFS, bcachefs and some others
_NO_FOLLOW = 1  # macOS: CLONE_NOFOLLOW


class Cloner:
    """Clones files as long as the disk can; after the first refusal it does not try again."""

    def __init__(self) -> None:
        self.works = sys.platform in ("linux", "darwin")

    def clone(self, source: Path | str, target: Path | str, mode: int) -> bool:
        """Create ``target`` as a clone and return True; return False, without it, if that is not possible.

        Raise FileNotFoundError without a source, and FileExistsError if the target exists.
        """
        if not self.works:
            return False
        try:
            return _clone(source, target, mode)
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError:  # another disk, or one that cannot share blocks
            self.works = False
            return False


def _clone(source: Path | str, target: Path | str, mode: int) -> bool:
    if sys.platform == "linux":
        origin = os.open(source, os.O_RDONLY)
        try:
            clone = create_file(target, mode)
            try:
                fcntl.ioctl(clone, _FICLONE, origin)
            except OSError:
                discard(Path(target))
                raise
            finally:
                os.close(clone)
        finally:
            os.close(origin)
    elif sys.platform == "darwin":
        import ctypes

        system = ctypes.CDLL(None, use_errno=True)
        if system.clonefile(os.fsencode(source), os.fsencode(target), _NO_FOLLOW):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), os.fspath(target))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(target, mode & ~umask)
    else:
        return False
    return True
