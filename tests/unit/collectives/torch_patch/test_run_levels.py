"""Options of a run that have no effect on a script without a session are refused."""

from __future__ import annotations

import sys

import msgspec
import pytest

from barnraise.collectives.torch_patch.run_levels import check_levels, check_run_levels, levels_of_run
from barnraise.core.errors import ConfigError
from barnraise.planning import Level, Levels
from barnraise.planning.inputs.levels import VARIABLE

INSIDE = Levels(inside=Level(all_reduce="star", codec="exact", period=1))


def test_algorithms_of_one_level_apply_to_groups_of_ours() -> None:
    check_levels(INSIDE, "exact", "barnraise")
    check_levels(Levels(), "", "gloo")


@pytest.mark.parametrize(
    ("levels", "sync", "backend", "message"),
    [
        (INSIDE, "", "gloo", "this group, which uses gloo"),
        (Levels(), "auto", "barnraise", "--sync auto has no effect"),
        (Levels(across=Level(all_reduce="ring")), "", "barnraise", "which know no sites"),
        (Levels(inside=Level(codec="int8")), "", "barnraise", "the codec or the period"),
        (Levels(inside=Level(period=4)), "", "barnraise", "the codec or the period"),
    ],
)
def test_option_without_effect_is_refused(levels: Levels, sync: str, backend: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_levels(levels, sync, backend)


def test_sessions_and_single_workers_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "barnraise.training.session", raising=False)
    assert levels_of_run() == Levels()
    monkeypatch.setenv(VARIABLE, msgspec.json.encode(INSIDE).decode())
    assert levels_of_run() == INSIDE
    check_run_levels("gloo", 1)
    with pytest.raises(ConfigError):
        check_run_levels("gloo", 2)
    monkeypatch.setitem(sys.modules, "barnraise.training.session", sys)
    check_run_levels("gloo", 2)
