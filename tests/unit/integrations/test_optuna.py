"""Optuna's storage over the agent of this machine: one machine, without a cluster."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import barnraise
from barnraise.core.errors import AgentError
from barnraise.kvstore.journals import MAX_ENTRY_BYTES
from tests.unit.lone_agent import lone_agent

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def agent() -> Iterator[Path]:
    with lone_agent() as state:
        yield state


@pytest.fixture
def journal(agent: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a journal of this test, as a program on this machine opens it."""
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(agent))
    name = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split()[0].split("[")[0][-60:].strip("_")
    yield name
    barnraise.optuna.delete_storage(name)


def study(name: str) -> Any:
    return optuna.create_study(
        storage=barnraise.optuna.storage(name),
        study_name="sweep",
        sampler=optuna.samplers.RandomSampler(),
        load_if_exists=True,
    )


def square(trial: Any) -> float:
    return float(trial.suggest_float("x", -1.0, 1.0) ** 2)


def test_study_is_the_same_at_every_storage(journal: str) -> None:
    first = study(journal)
    first.optimize(square, n_trials=5)
    again = study(journal)
    assert again.get_trials() == first.get_trials()
    assert again.best_trial == first.best_trial
    assert optuna.get_all_study_names(barnraise.optuna.storage(journal)) == ["sweep"]


def test_threads_share_a_sweep_without_a_doubled_trial(journal: str) -> None:
    study(journal)
    threads = [threading.Thread(target=lambda: study(journal).optimize(square, n_trials=6)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    trials = study(journal).get_trials()
    assert [trial.number for trial in trials] == list(range(18))
    assert {trial.state for trial in trials} == {optuna.trial.TrialState.COMPLETE}


def test_waiting_trial_is_taken_by_one_process_only(journal: str) -> None:
    first, second = study(journal), study(journal)
    first.enqueue_trial({"x": 0.5})
    tried = [first.ask(), second.ask()]
    assert sorted(trial.suggest_float("x", -1.0, 1.0) == 0.5 for trial in tried) == [False, True]


def test_values_that_are_not_finite_are_kept(journal: str) -> None:
    first = study(journal)
    trial = first.ask()
    trial.report(float("nan"), 0)
    trial.report(float("-inf"), 1)
    first.tell(trial, float("inf"))
    (kept,) = study(journal).get_trials()
    assert repr(kept.intermediate_values) == "{0: nan, 1: -inf}"
    assert kept.value == float("inf")


def test_storage_is_sent_to_another_process_without_its_connections(journal: str) -> None:
    first = study(journal)
    first.optimize(square, n_trials=2)
    copy = pickle.loads(pickle.dumps(first))
    copy.optimize(square, n_trials=2)
    assert len(first.get_trials()) == 4


def test_large_entry_is_refused_and_the_study_goes_on(journal: str) -> None:
    first = study(journal)
    trial = first.ask()
    with pytest.raises(AgentError, match=r"an entry of journal .* would have .*; it may have 256") as caught:
        trial.set_user_attr("picture", "x" * MAX_ENTRY_BYTES)
    assert "into a file" in caught.value.hint
    first.tell(trial, 1.0)
    assert study(journal).best_value == 1.0


def test_many_entries_are_read_in_pieces(journal: str) -> None:
    first = study(journal)
    trial = first.ask()
    for number in range(12):
        trial.set_user_attr(str(number), "x" * (MAX_ENTRY_BYTES - 300))
    assert len(study(journal).get_trials()[0].user_attrs) == 12


def test_deleted_journal_ends_its_processes_and_not_its_successor(journal: str) -> None:
    old = study(journal)
    old.optimize(square, n_trials=2)
    assert barnraise.optuna.delete_storage(journal)
    assert not barnraise.optuna.delete_storage(journal)
    new = study(journal)
    with pytest.raises(AgentError, match="it was deleted"):
        old.ask()
    new.optimize(square, n_trials=1)
    assert [trial.number for trial in study(journal).get_trials()] == [0]


def test_process_that_has_read_little_notices_a_deleted_journal(journal: str) -> None:
    empty, short = barnraise.optuna.storage(journal), study(journal)
    barnraise.optuna.delete_storage(journal)
    with pytest.raises(AgentError, match="has 0 entries, but this process has read 1: it was deleted"):
        short.ask()
    study(journal).optimize(square, n_trials=1)
    optuna.load_study(storage=empty, study_name="sweep").optimize(square, n_trials=1)
    assert [trial.number for trial in study(journal).get_trials()] == [0, 1]


def test_entry_for_a_deleted_journal_is_not_written(agent: Path, journal: str) -> None:
    old = barnraise.optuna.AgentJournal(agent, journal)
    old.append_logs([{"number": 1}])
    barnraise.optuna.delete_storage(journal)
    with pytest.raises(AgentError, match=r"was deleted.*; nothing was written") as caught:
        old.append_logs([{"number": 2}])
    assert "Open the storage again" in caught.value.hint
    assert not barnraise.optuna.delete_storage(journal), "the entry has made no journal"


def test_name_is_checked_before_anything_is_asked(journal: str) -> None:
    with pytest.raises(AgentError, match="is not the name of a journal"):
        barnraise.optuna.storage("../cluster")


def test_machine_without_an_agent_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path))
    with pytest.raises(AgentError, match="no agent keeps journals") as caught:
        barnraise.optuna.storage()
    assert "barnraise up" in caught.value.hint
