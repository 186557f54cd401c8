"""Choice of the logs that a machine copies from another one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.history.entries import RunId, Seconds

MAX_LOG = 16 << 20


class HeldLog(msgspec.Struct, frozen=True, array_like=True):
    """Log that a machine holds: its own, or a copy. ``at``: when the file was made.

    ``changed_at``: when its machine last wrote it; 0 if that is not known.
    """

    run: RunId
    node: Annotated[bytes, Meta(min_length=32, max_length=32)]
    identity: Annotated[bytes, Meta(min_length=16, max_length=16)]
    at: Seconds
    size: Annotated[int, Meta(ge=0, le=MAX_LOG)]
    changed_at: Seconds = 0.0


def logs_to_copy(
    held: Iterable[HeldLog],
    own: Mapping[tuple[str, bytes], HeldLog],
    *,
    sender: bytes,
    me: bytes,
    linked: Collection[bytes],
    unwanted: Collection[str] = (),
) -> list[HeldLog]:
    """Return the logs to copy from ``sender``: its own ones, and copies of machines that are not linked.

    ``unwanted``: runs whose records would be removed again. The writer's log always counts. Of two copies,
    the one of the later file is better, and of the same file the longer one. Nothing replaces a log that
    this machine writes.
    """
    wanted = []
    for log in held:
        known = own.get((log.run, log.node))
        if log.run in unwanted or log.node == me or (log.node != sender and log.node in linked):
            continue
        if known is None:
            is_better = True
        elif log.node == sender:
            is_better = (log.identity, log.size) != (known.identity, known.size)
        elif log.identity == known.identity:
            is_better = log.size > known.size
        else:
            is_better = log.at > known.at
        if is_better:
            wanted.append(log)
    return wanted
