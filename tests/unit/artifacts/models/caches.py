"""Hugging Face caches on disk, as huggingface_hub lays them out."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path

from barnraise.artifacts import PIECE, FolderLimits

LIMITS = FolderLimits(most_bytes=1 << 30, most_files=1000)
MODEL = "some-org/Some-Model.1B"


def weights(seed: int = 1, pieces: float = 2.5) -> bytes:
    """Return bytes of a few pieces."""
    return random.Random(seed).randbytes(int(pieces * PIECE))


def write_cache(cache: Path, repository: str, files: Mapping[str, bytes], revision: str = "main") -> str:
    """Write one version of a model and return its commit; the files have settled for a while."""
    commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
    folder = cache / f"models--{repository.replace('/', '--')}"
    ref = folder / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    (folder / "blobs").mkdir(exist_ok=True)
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        settled = time.time() - 3600
        os.utime(blob, (settled, settled))
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return commit


def blob(cache: Path, repository: str, content: bytes) -> Path:
    """Return the file of the cache that has a content."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    return folder / "blobs" / hashlib.sha256(content).hexdigest()
