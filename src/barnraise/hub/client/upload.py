"""Resumable upload of an encoded file to a hub: after a failure it continues at the hub's offset."""

from __future__ import annotations

from pathlib import Path

import httpx

from barnraise.core.errors import HubAway, HubRefused
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.messages import HubProgress, UpdateDeclaration

# Refusals after which the declaration tells where to go on.
_ASK_AGAIN = ("upload", "offset", "digest", "slow")
_BUSY = (429, 503)
_MOST_DIGESTS = 3  # times that what arrived had another hash
_LEAST_PIECE = 1 << 14
# How a piece fails that takes longer than this machine, or the hub, waits for it.
_TOO_SLOW = (httpx.WriteTimeout, httpx.WriteError, httpx.ReadTimeout)


def push(client: HubClient, declaration: UpdateDeclaration, path: Path) -> HubProgress:
    """Upload a file until the hub accepts it.

    Raise HubRefused with the reason if it does not. Repeating it is harmless.
    """
    waiting = client.backoff()
    progress: HubProgress | None = None
    digests, max_bytes = 0, client.piece_bytes
    with path.open("rb") as file:
        while True:
            client.wait_for_policy()
            try:
                if progress is None:
                    progress = client.ask("POST", "/v1/uploads", HubProgress, declaration)
                if progress.accepted:
                    return progress
                file.seek(progress.offset)
                piece = file.read(min(max_bytes, progress.piece))
                where = f"/v1/uploads/{progress.id}"
                progress = client.ask("PATCH", where, HubProgress, piece, query={"offset": progress.offset})
                waiting = client.backoff()
            except HubAway as error:
                if progress is not None and isinstance(error.__cause__, _TOO_SLOW):
                    max_bytes = _smaller(max_bytes)
                progress = None
                waiting.pause(error.message)
            except HubRefused as error:
                progress = None
                digests += error.kind == "digest"
                if error.kind == "slow":
                    max_bytes = _smaller(max_bytes)
                again = error.kind in _ASK_AGAIN or error.status in _BUSY
                if not again or digests > _MOST_DIGESTS:
                    raise
                waiting.pause(error.message, error.retry_s)


def _smaller(piece: int) -> int:
    """Return half of the piece size, but not less than the minimum."""
    return min(piece, max(_LEAST_PIECE, piece // 2))
