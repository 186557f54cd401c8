"""The choice of what is removed from the disk: never what an active run or a wanted checkpoint needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from barnraise.agent.disk.clean_plan import StoredRun, choose_environments, choose_runs, lost_sentence

NAMES = ("a", "b", "c", "d")


def stored(
    run: str, *, active: bool = False, fine: bool = True, step: int = 0, at: float = 1.0, resumes: str = ""
) -> StoredRun:
    return StoredRun(run, active, fine, step, at, tuple(resumes))


def removed(*runs: StoredRun, only: str = "", everything: bool = False) -> set[str]:
    return {
        choice.name for choice in choose_runs(runs, only=only, everything=everything) if choice.is_removed
    }


def test_finished_runs_are_removed_except_the_newest_checkpoint() -> None:
    runs = (stored("a", step=9, at=1), stored("b", step=5, at=2), stored("c", at=3))
    assert removed(*runs) == {"a", "c"}
    assert removed(*runs, everything=True) == {"a", "b", "c"}


def test_failed_run_with_a_checkpoint_is_kept_for_resume() -> None:
    runs = (stored("a", fine=False, step=9), stored("b", fine=False), stored("c", step=1, at=9))
    assert removed(*runs) == {"b"}
    choices = {choice.name: choice.reason for choice in choose_runs(runs)}
    assert choices == {"a": "it can be resumed", "b": "it has ended", "c": "it has the newest checkpoint"}


def test_run_is_kept_from_which_another_can_be_resumed() -> None:
    runs = (
        stored("a", step=9, at=1),
        stored("b", fine=False, resumes="a", at=2),
        stored("c", step=1, at=3),
    )
    assert removed(*runs) == {"b"}


def test_named_run_is_removed_and_no_other() -> None:
    runs = (stored("a", fine=False, step=9), stored("b"))
    assert removed(*runs, only="a") == {"a"}


@given(
    st.lists(
        st.builds(
            StoredRun,
            st.sampled_from(NAMES),
            st.booleans(),
            st.booleans(),
            st.integers(0, 3),
            st.floats(0, 10),
            st.lists(st.sampled_from(NAMES), max_size=2).map(tuple),
        ),
        unique_by=lambda item: item.run,
    ),
    st.sampled_from(["", *NAMES]),
    st.booleans(),
)
def test_active_runs_and_runs_that_they_continue_are_never_removed(
    runs: list[StoredRun], only: str, everything: bool
) -> None:
    chosen = removed(*runs, only=only, everything=everything)
    needed = {name for item in runs if item.is_active for name in (item.run, *item.resumes)}
    assert not chosen & needed
    if not only and not everything:
        ended = [item for item in runs if item.step and item.run not in needed]
        assert all(item.has_succeeded for item in ended if item.run in chosen)
        assert not ended or max(item.changed_at for item in ended) in [
            item.changed_at for item in ended if item.run not in chosen
        ]


def test_environment_is_removed_after_a_week_unless_it_is_in_use() -> None:
    now = 100 * 86400.0
    used_at = {"old": now - 8 * 86400, "new": now - 86400, "busy": 1.0, "torn": 0.0}
    choices = {choice.name: choice for choice in choose_environments(used_at, ["busy"], now)}
    assert {name for name, choice in choices.items() if choice.is_removed} == {"old", "torn"}
    assert choices["old"].reason == "not used for 8 days"
    every = choose_environments(used_at, ["busy"], now, everything=True)
    assert {choice.name for choice in every if not choice.is_removed} == {"busy"}


def test_lost_checkpoint_is_named() -> None:
    assert lost_sentence(stored("a")) == ""
    assert "run a can then no longer be resumed or exported from this machine" in lost_sentence(
        stored("a", step=907)
    )
