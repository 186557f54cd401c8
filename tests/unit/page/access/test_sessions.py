"""One-time links and sessions: each link opens one session, and a second use ends it."""

from __future__ import annotations

from barnraise.page.access.sessions import IDLE_S, LINK_S, LONGEST_S, PageSessions, is_same


class Clock:
    """Clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_link_opens_one_session() -> None:
    sessions = PageSessions(Clock())
    opened = sessions.redeem(sessions.new_link("here/"))
    assert opened is not None
    assert opened.place == "here/"
    assert sessions.token_of(opened.cookie) == opened.token


def test_second_use_is_refused_and_ends_the_session_of_the_first() -> None:
    sessions = PageSessions(Clock())
    key = sessions.new_link("here/")
    opened = sessions.redeem(key)
    assert opened is not None
    assert sessions.redeem(key) is None
    assert sessions.token_of(opened.cookie) is None


def test_unknown_and_old_links_open_nothing() -> None:
    clock = Clock()
    sessions = PageSessions(clock)
    key = sessions.new_link("here/")
    clock.now += LINK_S
    assert sessions.redeem(key) is None
    assert sessions.redeem("") is None
    assert sessions.redeem("\udcff" * 10) is None


def test_session_ends_when_idle_and_at_last_although_used() -> None:
    clock = Clock()
    sessions = PageSessions(clock)
    opened = sessions.redeem(sessions.new_link(""))
    assert opened is not None
    clock.now += IDLE_S - 1
    assert sessions.token_of(opened.cookie)
    for _ in range(int(LONGEST_S / IDLE_S) + 1):
        clock.now += IDLE_S - 1
        sessions.token_of(opened.cookie)
    assert sessions.token_of(opened.cookie) is None
    idle = sessions.redeem(sessions.new_link(""))
    assert idle is not None
    clock.now += IDLE_S
    assert sessions.token_of(idle.cookie) is None


def test_closed_session_and_cookie_of_other_agent_are_unknown() -> None:
    sessions, other = PageSessions(Clock()), PageSessions(Clock())
    opened, foreign = sessions.redeem(sessions.new_link("")), other.redeem(other.new_link(""))
    assert opened is not None
    assert foreign is not None
    assert sessions.token_of(foreign.cookie) is None
    sessions.close(opened.cookie)
    assert sessions.token_of(opened.cookie) is None


def test_links_and_sessions_are_bounded() -> None:
    sessions = PageSessions(Clock())
    keys = [sessions.new_link("") for _ in range(100)]
    assert sessions.redeem(keys[0]) is None
    opened = [sessions.redeem(sessions.new_link("")) for _ in range(100)]
    alive = [each for each in opened if each is not None and sessions.token_of(each.cookie)]
    assert len(alive) == 16


def test_secrets_are_compared() -> None:
    assert is_same("abc", "abc")
    assert not is_same("", "abc")
    assert not is_same("\udcff", "abc")
