"""Rules about owners and modes on Unix."""

from __future__ import annotations

import stat

import pytest

from barnraise.core.ownership.rules import PathFacts, refuse_directory, refuse_file

_ME, _OTHER, _MY_GROUP = 1000, 1001, 1000
_HOME = "/home/anna"
_ROOT = PathFacts("/", 0, 0, stat.S_IFDIR | 0o755)
_SHARED = PathFacts("/tmp", 0, 0, stat.S_IFDIR | 0o1777)


def _folder(mode: int, owner: int = _ME, group: int = _MY_GROUP, path: str = "/srv/state") -> PathFacts:
    return PathFacts(path, owner, group, stat.S_IFDIR | mode)


def _refuse(*chain: PathFacts) -> str:
    refusal = refuse_directory(chain, _ME, lambda group: group == _MY_GROUP, _HOME)
    return refusal.reason if refusal is not None else ""


@pytest.mark.parametrize(
    "chain",
    [
        (_folder(0o700), _ROOT),
        (_folder(0o755), _ROOT),
        (_folder(0o775), _ROOT),  # the group is the user's own
        (_folder(0o700), _SHARED, _ROOT),  # others cannot rename our entry there
        (_folder(0o700), PathFacts("/link", _ME, _MY_GROUP, stat.S_IFLNK | 0o777), _ROOT),
    ],
)
def test_directory_that_only_its_owner_can_change_is_accepted(chain: tuple[PathFacts, ...]) -> None:
    assert _refuse(*chain) == ""


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        ((_folder(0o700, owner=_OTHER), _ROOT), "belongs to another user"),
        ((_folder(0o755, owner=0), _ROOT), "belongs to another user (root)"),
        ((_folder(0o777), _ROOT), "other users may write"),
        ((_folder(0o1777), _ROOT), "other users may write"),
        ((_folder(0o770, group=_OTHER), _ROOT), "other users may write"),
        ((_folder(0o700), _folder(0o755, owner=_OTHER, path="/srv"), _ROOT), "above /srv/state"),
        ((_folder(0o700), _folder(0o777, path="/srv"), _ROOT), "write to the directory /srv"),
        ((_folder(0o700), PathFacts("/link", _OTHER, 0, stat.S_IFLNK | 0o777), _ROOT), "/link, above"),
    ],
)
def test_directory_that_another_user_can_change_is_rejected(
    chain: tuple[PathFacts, ...], reason: str
) -> None:
    assert reason in _refuse(*chain)


def test_hints_suggest_the_home_directory_and_no_shared_one() -> None:
    foreign = refuse_directory((_folder(0o700, owner=_OTHER),), _ME, lambda group: False, _HOME)
    assert foreign is not None
    assert _HOME in foreign.hint
    assert "tmp" not in foreign.hint


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (PathFacts("f", _ME, 0, stat.S_IFREG | 0o600), None),
        (PathFacts("f", 0, 0, stat.S_IFREG | 0o400), None),
        (PathFacts("f", _OTHER, 0, stat.S_IFREG | 0o600), "belongs to another user (user id 1001)"),
        (PathFacts("f", _ME, 0, stat.S_IFREG | 0o640), "mode 0640"),
        (PathFacts("f", _ME, 0, stat.S_IFREG | 0o602), "mode 0602"),
        (PathFacts("f", _ME, 0, stat.S_IFIFO | 0o600), "is not a file"),
        (PathFacts("f", _ME, 0, stat.S_IFLNK | 0o777), "is not a file"),
    ],
)
def test_secret_file_is_accepted_only_if_no_other_user_can_use_it(
    facts: PathFacts, reason: str | None
) -> None:
    refusal = refuse_file(facts, _ME, is_secret=True)
    assert refusal is None if reason is None else refusal is not None and reason in refusal.reason


def test_state_file_may_be_read_by_others_and_not_written() -> None:
    assert refuse_file(PathFacts("f", _ME, 0, stat.S_IFREG | 0o644), _ME, is_secret=False) is None
    assert refuse_file(PathFacts("f", _ME, 0, stat.S_IFREG | 0o664), _ME, is_secret=False) is not None
    assert refuse_file(PathFacts("f", _OTHER, 0, stat.S_IFREG | 0o600), _ME, is_secret=False) is not None
