"""A blob on its way into a file, which goes on where an attempt before it ended, whoever sent that part."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import httpx


def partial_size(draft: Path) -> int:
    return draft.stat().st_size if draft.exists() else 0


def resume_headers(draft: Path) -> dict[str, str]:
    """As it is, and only what is missing."""
    have = partial_size(draft)
    return {"accept-encoding": "identity"} | ({"range": f"bytes={have}-"} if have else {})


def receive(response: httpx.Response, parts: Iterable[bytes], draft: Path, bound: int) -> int | None:
    """How many bytes are there now; None if it were more than ``bound``: then nothing is left of them."""
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
