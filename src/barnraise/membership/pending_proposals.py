"""Pending proposals: trust log entries that owners want, until they are decided or expire. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from barnraise.core.errors import BarnraiseError
from barnraise.identity.trust import RevokeMember, RotateKey, decode_entry
from barnraise.membership.history import History

_WISH_S = 30.0
_AGAIN_S = 1.0
_MOST_WISHES = 64
_MOST_AT_ONCE = 16


class FittingProposal(NamedTuple):
    """Entries that can be decided now, and nodes that must leave the view first.

    The decision that revokes a node carries the new secret, so that node must not vote on it. ``rotated``:
    new keys of nodes, by the old ones; the new key takes the place in the view.
    """

    entries: tuple[bytes, ...]
    barred: frozenset[bytes]
    rotated: dict[bytes, bytes]


class PendingProposals:
    """Proposed entries, kept by every node so that they survive the coordinator."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}
        self._repeated = -1e9

    def add(self, entry: bytes, history: History, now: float) -> None:
        """Add an entry that extends the current log; ignore any other."""
        if entry in self._until or len(self._until) >= _MOST_WISHES:
            return
        try:
            history.log.extended(decode_entry(entry))
        except BarnraiseError:
            return  # done already, or signed on another log: its proposer signs it again
        self._until[entry] = now + _WISH_S

    def forget(self, entries: tuple[bytes, ...]) -> None:
        """Remove entries that were decided."""
        for entry in entries:
            self._until.pop(entry, None)

    def removals(self) -> frozenset[bytes]:
        """Return the nodes with a proposed revocation, which must neither coordinate nor be told."""
        return frozenset(node for node in map(_removed, self._until) if node is not None)

    def due(self, now: float, *, at_once: bool = False) -> tuple[bytes, ...]:
        """Return the entries to send to the coordinator now, and drop expired ones."""
        self._until = {entry: until for entry, until in self._until.items() if now < until}
        if not self._until or (now - self._repeated < _AGAIN_S and not at_once):
            return ()
        self._repeated = now
        return tuple(self._until)

    def fitting(self, history: History) -> FittingProposal:
        """Return the entries that extend the log one after the other."""
        log = history.log
        entries: list[bytes] = []
        barred: set[bytes] = set()
        rotated: dict[bytes, bytes] = {}
        for data in self._until:
            try:
                entry = decode_entry(data)
                extended = log.extended(entry)
            except BarnraiseError:
                continue
            if isinstance(entry.body, RevokeMember):
                barred.add(entry.body.node)
                if entry.body.node in history.members:
                    break
            if isinstance(entry.body, RotateKey):
                rotated[entry.body.node] = entry.body.new
            log = extended
            entries.append(data)
            if len(entries) == _MOST_AT_ONCE:
                break
        return FittingProposal(tuple(entries), frozenset(barred), rotated)


@lru_cache(maxsize=256)
def _removed(data: bytes) -> bytes | None:
    body = decode_entry(data).body
    return body.node if isinstance(body, RevokeMember) else None
