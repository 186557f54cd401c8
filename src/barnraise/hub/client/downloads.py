"""Resumable download of a blob into a partial file. Different servers may send its parts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import httpx

from barnraise.core.sanitize import printable

# Of every request. Answers are read as they were sent, so that their size is known before they are in memory.
AS_SENT = {"accept-encoding": "identity"}
_SHOWN = 40  # characters of an encoding's name


def encoding_of(response: httpx.Response) -> str:
    """Return the encoding that an answer names; empty if it comes as it is."""
    named = response.headers.get("content-encoding", "").strip().lower()
    return "" if named == "identity" else printable(named[:_SHOWN])


def partial_size(draft: Path) -> int:
    """Return the size of the partial file; 0 if there is none."""
    return draft.stat().st_size if draft.exists() else 0


def resume_headers(draft: Path) -> dict[str, str]:
    """Return the request headers for the missing rest."""
    have = partial_size(draft)
    return {"range": f"bytes={have}-"} if have else {}


def receive(response: httpx.Response, parts: Iterable[bytes], draft: Path, bound: int) -> int | None:
    """Write the parts to the partial file and return its size.

    Remove the file and return None if it exceeds ``bound``.
    """
    resumed = response.status_code == 206
    total = partial_size(draft) if resumed else 0
    with draft.open("ab" if resumed else "wb") as file:
        for part in parts:
            total += len(part)
            if total > bound:
                break
            file.write(part)
    if total > bound:
        draft.unlink()
        return None
    return total
