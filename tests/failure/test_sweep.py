"""Sweeps of several processes over real agents that die: no trial is lost or counted twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from barnraise.core.errors import AgentError, MembershipError
from tests.failure.local_agents import PATIENCE_S, LocalAgent, local_cluster

optuna = pytest.importorskip("optuna")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
_WORKER = "tests.failure.sweep_worker"
_REPOSITORY = Path(__file__).parents[2]
COMPLETE = optuna.trial.TrialState.COMPLETE


def journal(agent: LocalAgent, timeout_s: float = PATIENCE_S) -> Any:
    """Return the storage that a program on this agent's machine gets."""
    from barnraise.integrations.optuna import AgentJournal

    return optuna.storages.JournalStorage(AgentJournal(agent.state, "default", timeout_s))


def study_at(agent: LocalAgent, name: str = "sweep") -> Any:
    return optuna.load_study(storage=journal(agent), study_name=name, sampler=optuna.samplers.RandomSampler())


class Worker:
    """Process of a sweep on one machine."""

    def __init__(self, agent: LocalAgent, trials: int, pause_s: float = 0.2) -> None:
        path = os.pathsep.join([str(_REPOSITORY / "src"), str(_REPOSITORY)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, "sweep", str(trials), str(pause_s)],
            env=agent.environment | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def read_until(self, word: str, count: int) -> None:
        """Read its output until a word has come ``count`` times, or the output ends."""
        assert self.process.stdout is not None
        while sum(line.startswith(word) for line in self.lines) < count:
            line = self.process.stdout.readline()
            if not line:
                return
            self.lines.append(line)

    def end(self) -> int:
        """Read the rest of its output, and return its exit code."""
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.read_until("nothing", 1)
            self.process.stdout.close()
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.end()

    @property
    def finished(self) -> dict[int, float]:
        """Return number and parameter of each trial that the process has finished."""
        words = [line.split() for line in self.lines if line.startswith("finish")]
        return {int(number): float(x) for _, number, x in words}


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker; what is left of them is killed at the end."""
    started: list[Worker] = []

    def start_worker(*arguments: Any) -> Worker:
        started.append(Worker(*arguments))
        return started[-1]

    yield start_worker
    for worker in started:
        worker.kill()


def check_sweep(agents: list[LocalAgent], workers: list[Worker]) -> list[Any]:
    """Check that all machines see the same trials, with each finished one exactly once; return them."""
    seen = [study_at(agent).get_trials() for agent in agents]
    assert all(trials == seen[0] for trials in seen)
    assert [trial.number for trial in seen[0]] == list(range(len(seen[0])))
    complete = {trial.number: trial for trial in seen[0] if trial.state == COMPLETE}
    reported = Counter(number for worker in workers for number in worker.finished)
    assert not [number for number, count in reported.items() if count > 1], "two processes had one trial"
    assert set(reported) <= set(complete), "a finished trial is lost"
    for worker in workers:
        for number, x in worker.finished.items():
            trial = complete[number]
            assert trial.params == {"x": x}
            assert (trial.values, trial.user_attrs, trial.intermediate_values) == (
                [x * x],
                {"twice": 2 * x},
                {0: x},
            )
    assert len({study_at(agent).best_trial.number for agent in agents}) == 1
    return [trial for trial in seen[0] if trial.state == COMPLETE]


def test_sweep_survives_a_killed_worker_and_killed_agents(start: Callable[..., Worker]) -> None:
    with local_cluster(3) as agents:
        optuna.create_study(storage=journal(agents[0]), study_name="sweep")
        victim, *rest = workers = [
            start(agents[0], 50),
            start(agents[0], 8),
            start(agents[1], 8),
            start(agents[2], 8),
        ]
        victim.read_until("begin", 2)
        victim.kill()
        rest[1].read_until("finish", 2)
        agents[1].kill()
        rest[0].read_until("finish", 4)
        agents[1].start()
        agents[1].until(lambda: agents[1].sees(3), "it is back")
        agents[0].kill()  # the primary of the journals
        rest[2].read_until("finish", 5)
        agents[0].start()
        assert [worker.end() for worker in rest] == [0, 0, 0]
        assert [len(worker.finished) for worker in rest] == [8, 8, 8]
        agents[0].until(lambda: agents[0].sees(3), "it is back")
        complete = check_sweep(agents, workers)
        # The rest of the trials that were asked for, by another process.
        last = start(agents[2], 32 - len(complete), 0.0)
        assert last.end() == 0
        assert len(check_sweep(agents, [*workers, last])) == 32


def test_journal_survives_the_death_of_all_agents_at_once(start: Callable[..., Worker]) -> None:
    with local_cluster(2) as agents:
        optuna.create_study(storage=journal(agents[0]), study_name="sweep")
        worker = start(agents[1], 5, 0.0)
        worker.read_until("finish", 3)
        for agent in agents:
            agent.kill()
        for agent in agents:
            agent.start()
        assert worker.end() == 0
        assert len(check_sweep(agents, [worker])) == 5


def test_append_without_a_quorum_names_the_machines_and_fails_in_time() -> None:
    with local_cluster(3) as agents:
        study = optuna.create_study(storage=journal(agents[0], 6.0), study_name="sweep")
        study.tell(study.ask(), 1.0)
        for agent in agents[1:]:
            agent.kill()
        with pytest.raises(
            MembershipError, match=r"could not use journal 'default' in time: .*waits for .*m1"
        ):
            study.ask()
        agents[1].start()
        agents[1].until(lambda: agents[1].sees(2), "two are a quorum")
        for agent in agents[:2]:
            again = study_at(agent)
            again.tell(again.ask(), 2.0)
        assert study_at(agents[1]).best_value == 1.0
        assert len([trial for trial in study_at(agents[0]).get_trials() if trial.state == COMPLETE]) == 3


def test_guest_has_no_journals() -> None:
    with local_cluster(2, roles=["guest"]) as agents:
        with pytest.raises(AgentError, match="is a guest"):
            journal(agents[1])
        optuna.create_study(storage=journal(agents[0]), study_name="sweep")


def test_example_runs_on_all_machines_of_a_cluster(tmp_path: Path) -> None:
    shutil.copy(_REPOSITORY / "examples" / "sweep.py", tmp_path)
    with local_cluster(2) as agents:
        command = [sys.executable, "-m", "barnraise.cli.main", "run", "sweep.py", "--small"]
        done = subprocess.run(
            command, cwd=tmp_path, env=agents[0].environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert "2 workers on 2 machines" in done.stdout + done.stderr
        assert "best: " in done.stdout
        seen = [study_at(agent, "spiral").get_trials() for agent in agents]
        assert seen[0] == seen[1]
        assert 8 <= sum(trial.state == COMPLETE for trial in seen[0]) <= 9
