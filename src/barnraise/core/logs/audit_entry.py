"""Entry of the audit log: one JSON object on one line, whose texts cannot command a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal, get_args

import msgspec

from barnraise.core.sanitize import printable

AuditEvent = Literal[
    "agent-started",
    "asked-by-owner",
    "branch-opened",
    "cluster-joined",
    "cluster-left",
    "code-burned",
    "code-opened",
    "consent-given",
    "consent-refused",
    "identity-changed",
    "invite-made",
    "invite-used",
    "invite-withdrawn",
    "machine-admitted",
    "machine-removed",
    "member-expelled",
    "page-opened",
    "psk-made",
    "run-ended",
    "run-started",
    "run-stopped",
]
EVENTS: tuple[str, ...] = get_args(AuditEvent)
MAX_TEXT = 400


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Event with its time by this machine's clock, what it is about, and the machine or person behind it.

    ``digest``: SHA-256 of the signed order of a run, or of a hub's code.
    """

    at: str
    event: AuditEvent
    subject: str = ""
    by: str = ""
    detail: str = ""
    digest: str = ""

    @property
    def seconds(self) -> float:
        """Return the wall time as seconds since 1970; 0 if it cannot be read."""
        try:
            return datetime.fromisoformat(self.at).timestamp()
        except ValueError:
            return 0.0


_decoder = msgspec.json.Decoder(AuditEntry)


def make_entry(
    seconds: float, event: AuditEvent, *, subject: str = "", by: str = "", detail: str = "", digest: str = ""
) -> AuditEntry:
    """Return an entry whose texts are short and printable; they may come from other machines."""
    at = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return AuditEntry(
        at=at,
        event=event,
        subject=_clean(subject),
        by=_clean(by),
        detail=_clean(detail),
        digest=_clean(digest),
    )


def encode_line(entry: AuditEntry) -> bytes:
    """Encode an entry as one line."""
    return msgspec.json.encode(entry) + b"\n"


def decode_lines(data: bytes) -> list[AuditEntry]:
    """Decode lines; a line that a full disk or another program damaged is left out."""
    entries = []
    for line in data.splitlines():
        try:
            entries.append(_decoder.decode(line))
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
    return entries


def newest(entries: Iterable[AuditEntry], *, since: float = 0.0, limit: int = 0) -> list[AuditEntry]:
    """Return the entries from ``since`` on, the newest last, at most ``limit`` of them; 0: all."""
    chosen = [entry for entry in entries if entry.seconds >= since]
    return chosen[-limit:] if limit else chosen


def _clean(text: str) -> str:
    return printable(" ".join(text.split()), limit=MAX_TEXT)
