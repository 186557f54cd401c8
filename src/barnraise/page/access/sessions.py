"""One-time links and the sessions that they open. Pure.

Only hashes of secrets are kept, so a lookup takes the same time for every guess. Everything is in memory: a
cookie of another agent, or of an earlier process of this one, is worth nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

LINK_S = 120.0
IDLE_S = 12 * 3600.0
LONGEST_S = 7 * 86400.0
_MOST_LINKS = 16
_MOST_SESSIONS = 16


@dataclass(frozen=True)
class OpenedSession:
    """Session of a browser. ``cookie`` is given out once; ``token`` stands in each form."""

    cookie: str
    token: str
    place: str


@dataclass
class _Link:
    place: str
    until: float
    opened: bytes | None = None  # hash of the session's cookie, once the link was used


@dataclass
class _Session:
    token: str
    since: float
    used: float


class PageSessions:
    """Links that were given out, and sessions that are open. The oldest ones make room for new ones."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._links: dict[bytes, _Link] = {}
        self._sessions: dict[bytes, _Session] = {}

    def new_link(self, place: str) -> str:
        """Return the key of a new link; ``place`` is what the browser shall see first."""
        self._forget_old()
        key = secrets.token_urlsafe(32)
        self._links[_digest(key)] = _Link(place, self._now() + LINK_S)
        while len(self._links) > _MOST_LINKS:
            del self._links[next(iter(self._links))]
        return key

    def redeem(self, key: str) -> OpenedSession | None:
        """Open a session with a link; None if there is no such link, or if it was used before.

        A second use ends the session of the first one: one of the two was not the person.
        """
        self._forget_old()
        link = self._links.get(_digest(key))
        if link is None:
            return None
        if link.opened is not None:
            self._sessions.pop(link.opened, None)
            return None
        cookie, token = secrets.token_urlsafe(32), secrets.token_urlsafe(24)
        link.opened = _digest(cookie)
        self._sessions[link.opened] = _Session(token, self._now(), self._now())
        while len(self._sessions) > _MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return OpenedSession(cookie, token, link.place)

    def token_of(self, cookie: str) -> str | None:
        """Return the form token of an open session, which this use keeps alive; None if there is none."""
        self._forget_old()
        session = self._sessions.get(_digest(cookie))
        if session is None:
            return None
        session.used = self._now()
        return session.token

    def close(self, cookie: str) -> None:
        """Close the session of a cookie."""
        self._sessions.pop(_digest(cookie), None)

    def _forget_old(self) -> None:
        now = self._now()
        for digest in [digest for digest, link in self._links.items() if link.until <= now]:
            del self._links[digest]
        for digest, session in list(self._sessions.items()):
            if now - session.used >= IDLE_S or now - session.since >= LONGEST_S:
                del self._sessions[digest]


def is_same(given: str, expected: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()
