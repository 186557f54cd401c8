"""Faults of a split model at each operation of a machine, simulated in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from barnraise.training.pipeline import split_loop
from barnraise.training.pipeline.prediction import placement_watch
from barnraise.training.session import Session
from tests.unit.training.pipeline.simulated_disks import SimulatedDisks
from tests.unit.training.pipeline.simulated_run import (
    Fault,
    InGroup,
    Killed,
    Kind,
    Script,
    SimulatedManager,
    SimulatedRun,
    StateLost,
    Vote,
    bind,
    prepare,
)
from tests.unit.training.pipeline.simulated_training import (
    Expected,
    check,
    resume,
    script,
    train_until,
)
from tests.unit.training.pipeline.split_workers import train

MEMORY, SMALL = 9000, 5500  # bytes: for two of the five blocks, and for one in the middle
UNEQUAL = {"a": MEMORY, "b": 6750, "c": MEMORY}  # the model does not fit on a and b, also without mirrors
ALL_HAVE_THEIRS = "all-gather of 0 bytes"
LOST = Fault("c", Vote(2), "die")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(tmp_path_factory.mktemp("alone"))


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


def test_threads_train_as_one_process(tmp_path: Path, expected: Expected) -> None:
    run = SimulatedRun("abc", script(expected, tmp_path))
    run.run()
    check(run, expected, tmp_path, "abc")


def test_machine_with_two_workers_is_mirrored_elsewhere(tmp_path: Path, expected: Expected) -> None:
    """Machine a has the workers a and A; with it, two neighbours of the pipeline are lost at once."""
    run = SimulatedRun(
        "aAbc", script(expected, tmp_path), places={"A": "a"}, faults=[Fault("a", Vote(2), "die")]
    )
    run.run()
    check(run, expected, tmp_path, "bc")
    assert run.generations == ["aAbc", "bc"]


def operations_of_regroup(run: SimulatedRun, machine: str) -> list[InGroup]:
    """Return a worker's operations in its second group, up to its first step."""
    performed = [each.what for each in run.operations[machine] if each.generation == 2]
    return [InGroup(2, number) for number in range(performed.index(ALL_HAVE_THEIRS) + 1)]


@pytest.fixture(scope="module")
def first_failure(expected: Expected, tmp_path_factory: pytest.TempPathFactory) -> SimulatedRun:
    """Return a run in which c is lost, and a, b and d continue."""
    with pytest.MonkeyPatch.context() as patches:
        prepare(patches)
        run = SimulatedRun("abcd", script(expected, tmp_path_factory.mktemp("first")), faults=[LOST])
        run.run()
    assert run.generations == ["abcd", "abd"]
    return run


def check_second_failure(
    run: SimulatedRun, machine: str, kind: Kind, expected: Expected, folder: Path
) -> None:
    """Let a second fault come at each operation of a regroup, and compare the results."""
    operations = operations_of_regroup(run, machine)
    assert len(operations) > 10
    survivors = "bd" if kind.startswith("die") else "abd"
    for operation in operations:
        faults = [LOST, Fault(machine, operation, kind)]
        again = SimulatedRun("abcd", script(expected, folder), faults=faults)
        again.run()
        check(again, expected, folder, survivors)
        assert again.generations[:3] == ["abcd", "abd", survivors]


def test_broken_link_at_any_point_of_a_regroup_loses_nothing(
    first_failure: SimulatedRun, tmp_path: Path, expected: Expected
) -> None:
    check_second_failure(first_failure, "b", "break", expected, tmp_path)


def test_broken_link_while_a_checkpoint_is_restored_loses_nothing(tmp_path: Path, expected: Expected) -> None:
    """Parts that a member has not got before are read again, until a step is applied."""
    disks = SimulatedDisks(tmp_path / "disks")
    train_until(3, "abc", expected, disks, tmp_path)
    once = resume("abc", expected, disks, tmp_path, "train-once")
    performed = [each.what for each in once.operations["b"]]
    for operation in range(1, performed.index(ALL_HAVE_THEIRS) + 1):
        faults = [Fault("b", operation, "break-after")]
        run = resume("abc", expected, disks, tmp_path, f"train-{operation}", faults=faults)
        check(run, expected, tmp_path, "abc")
        assert run.generations == ["abc", "abc"]
        assert {len(losses) for losses in run.results.values()} == {3}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["die", "die-after", "break", "break-after"])
def test_failure_of_a_joining_worker_loses_nothing(kind: Kind, tmp_path: Path, expected: Expected) -> None:
    for operation in range(12):
        faults = [Fault("d", operation, kind)]
        run = SimulatedRun("abcd", script(expected, tmp_path), later={"d": 2}, faults=faults)
        run.run()
        check(run, expected, tmp_path, "abc" if kind.startswith("die") else "abcd")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "kind"),
    [
        *[("a", "die"), ("a", "die-after"), ("a", "break"), ("a", "break-after")],
        *[("b", "break-after"), ("d", "break"), ("d", "break-after")],
    ],
)
def test_second_failure_at_any_point_of_a_regroup_loses_nothing(
    machine: str, kind: Kind, first_failure: SimulatedRun, tmp_path: Path, expected: Expected
) -> None:
    check_second_failure(first_failure, machine, kind, expected, tmp_path)


def placed_script(expected: Expected, folder: Path, runs: dict[str, list[Any]]) -> Script:
    """Return a script that trains, and notes the blocks of all ranks after each step."""

    def main(session: Session, manager: SimulatedManager) -> list[float]:
        bind(manager)

        def note() -> None:
            assert session._split is not None
            loop = session._split.loop
            blocks = [run[1] - run[0] if run is not None else 0 for run in loop.runs]
            runs.setdefault(manager.machine, []).append(dict(zip(manager.members, blocks, strict=True)))

        path = folder / f"{manager.machine}.safetensors"
        return train(session, expected.base, path, after_step=note)

    return main


def test_slow_machine_has_no_blocks_and_takes_over_after_a_death(tmp_path: Path, expected: Expected) -> None:
    """Each machine has memory for two of the five blocks. The slow one is a spare, until it is needed."""
    runs: dict[str, list[Any]] = {}
    run = SimulatedRun(
        "abcd",
        placed_script(expected, tmp_path, runs),
        speeds={"d": 30.0},
        probes=True,
        memory=dict.fromkeys("abcd", MEMORY),
        faults=[Fault("a", Vote(3), "die")],
    )
    run.run()
    check(run, expected, tmp_path, "bcd")
    for machine in "bcd":
        assert runs[machine][0]["d"] == 0
        assert runs[machine][-1]["d"] > 0


def test_small_machine_between_two_others_trains_with_them(tmp_path: Path, expected: Expected) -> None:
    """Machine a is the first one, and has no memory for the embeddings or the head beside a block."""
    runs: dict[str, list[Any]] = {}
    memory = {"a": SMALL, "b": MEMORY, "c": MEMORY}
    run = SimulatedRun("abc", placed_script(expected, tmp_path, runs), memory=memory)
    run.run()
    check(run, expected, tmp_path, "abc")
    assert runs["a"][-1] == {"a": 1, "b": 2, "c": 2}


def when_waiting(monkeypatch: pytest.MonkeyPatch, act: Callable[[SimulatedManager], None]) -> None:
    """Let something happen when a worker says that it waits, before it measures again."""

    def report(manager: SimulatedManager, reason: str) -> None:
        if reason:
            manager.waits_for.append(reason)
            act(manager)

    monkeypatch.setattr(SimulatedManager, "report_waiting", report)
    monkeypatch.setattr(split_loop, "_REMEASURE_S", 0.0)


def get_memory(manager: SimulatedManager) -> None:
    manager.run.memory[manager.machine] = 30000


def test_machines_that_wait_go_on_when_memory_becomes_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expected: Expected
) -> None:
    """A process that has just died keeps its memory for a moment. So free memory is measured again."""
    run = SimulatedRun("abc", script(expected, tmp_path), memory=UNEQUAL, faults=[LOST])
    when_waiting(monkeypatch, get_memory)
    run.run()
    check(run, expected, tmp_path, "ab")
    waiting = [reason for manager in run.managers.values() for reason in manager.waits_for]
    assert waiting == ["another machine, or more free memory"] * 2
    assert run.generations == ["abc", "ab"]


def test_pause_while_machines_wait_for_memory_hands_state_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expected: Expected
) -> None:
    """Machine b has the only copies of some state when it leaves, and a has memory for them."""
    run = SimulatedRun("abc", script(expected, tmp_path), memory=UNEQUAL, faults=[LOST])

    def leave(manager: SimulatedManager) -> None:
        if manager.machine == "b":
            run.leaving.add("b")
        else:
            get_memory(manager)

    when_waiting(monkeypatch, leave)
    run.run()
    check(run, expected, tmp_path, "a")
    assert run.generations == ["abc", "ab", "a"]


def test_death_before_the_first_step_lets_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expected: Expected
) -> None:
    run = SimulatedRun(
        "abc",
        script(expected, tmp_path),
        memory=UNEQUAL,
        faults=[Fault("c", Vote(1), "die")],
    )
    when_waiting(monkeypatch, get_memory)
    run.run()
    check(run, expected, tmp_path, "ab")


def test_spare_does_not_continue_without_the_trained_state(tmp_path: Path, expected: Expected) -> None:
    """Machine a has all blocks, and b is its mirror. Both die, and c has only counted the steps."""
    given: Any = {"speeds": {"b": 30.0, "c": 30.0}, "probes": True, "memory": dict.fromkeys("abc", 30000)}
    once = SimulatedRun("abc", script(expected, tmp_path), **given)
    once.run()
    gathers = [
        number for number, each in enumerate(once.operations["b"]) if each.what.startswith("all-gather")
    ]
    faults = [Fault("a", Vote(3), "die"), Fault("b", gathers[8], "die")]  # at the same vote
    run = SimulatedRun("abc", script(expected, tmp_path), faults=faults, **given)
    run.run()
    assert run.results == {}
    assert isinstance(run.ends["c"], StateLost)


def test_checkpoint_of_another_adapter_is_refused(tmp_path: Path, expected: Expected) -> None:
    disks = SimulatedDisks(tmp_path / "disks")
    train_until(3, "ab", Expected(tmp_path / "other", trained=[3]), disks, tmp_path)
    with pytest.raises(AssertionError) as caught:
        resume("ab", expected, disks, tmp_path)
    assert "trains other parameters" in str(caught.value.__cause__)


@pytest.fixture
def often_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_watch, "_STEPS", 1)
    monkeypatch.setattr(placement_watch, "_SHARE", 1e9)


@pytest.mark.usefixtures("often_checked")
def test_machine_that_turns_out_slow_loses_its_blocks_in_the_same_group(
    tmp_path: Path, expected: Expected
) -> None:
    runs: dict[str, list[Any]] = {}
    run = SimulatedRun("abc", placed_script(expected, tmp_path, runs), speeds={"c": 30.0})
    run.run()
    check(run, expected, tmp_path, "abc")
    assert run.generations == ["abc"]
    assert runs["a"][0]["c"] > 0
    assert runs["a"][-1]["c"] == 0
    assert runs["a"] == runs["b"] == runs["c"]


@pytest.mark.usefixtures("often_checked")
@pytest.mark.parametrize("kind", ["die", "die-after", "break", "break-after"])
def test_failure_while_blocks_move_on_purpose_loses_nothing(
    kind: Kind, tmp_path: Path, expected: Expected
) -> None:
    once = SimulatedRun("abc", script(expected, tmp_path), speeds={"c": 30.0})
    once.run()
    gathers = [number for number, each in enumerate(once.operations["b"]) if each.what == ALL_HAVE_THEIRS]
    for operation in range(gathers[1] - 4, gathers[1] + 2):
        faults = [Fault("b", operation, kind)]
        run = SimulatedRun("abc", script(expected, tmp_path), speeds={"c": 30.0}, faults=faults)
        run.run()
        check(run, expected, tmp_path, "ac" if kind.startswith("die") else "abc")


REPLICA = {"a": 30000, "b": MEMORY, "c": MEMORY, "d": MEMORY}  # a holds the whole model, the others not
FAST = dict.fromkeys("abcd", 0.5)


@pytest.mark.parametrize(
    ("victim", "kind"), [("", "die"), *((name, kind) for name in "abc" for kind in ("die", "die-after"))]
)
def test_full_replica_and_a_pipeline_train_as_one_process(
    victim: str, kind: Kind, tmp_path: Path, expected: Expected
) -> None:
    """Machine a trains some micro-batches alone. It and the others have copies of the same state."""
    runs: dict[str, list[Any]] = {}
    faults = [Fault(victim, Vote(3), kind)] if victim else []
    run = SimulatedRun(
        "abcd",
        placed_script(expected, tmp_path, runs),
        speeds=FAST,
        probes=True,
        memory=REPLICA,
        faults=faults,
    )
    run.run()
    check(run, expected, tmp_path, "".join(name for name in "abcd" if name != victim), 1e-5)
    assert runs["d"][0]["a"] == 5
    assert runs["d"][0]["b"] + runs["d"][0]["c"] + runs["d"][0]["d"] == 5
    assert len(run.generations) == (2 if victim else 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["die", "die-after", "break", "break-after"])
def test_failure_of_a_replica_at_any_operation_of_a_step_loses_nothing(
    kind: Kind, tmp_path: Path, expected: Expected
) -> None:
    for machine in "ab":
        once = SimulatedRun("abcd", script(expected, tmp_path), speeds=FAST, probes=True, memory=REPLICA)
        once.run()
        votes = [
            number for number, each in enumerate(once.operations[machine]) if each.what.startswith("all")
        ]
        for operation in range(votes[7], votes[8] + 1):
            faults = [Fault(machine, operation, kind)]
            run = SimulatedRun(
                "abcd", script(expected, tmp_path), speeds=FAST, probes=True, memory=REPLICA, faults=faults
            )
            run.run()
            survivors = "abcd".replace(machine, "") if kind.startswith("die") else "abcd"
            check(run, expected, tmp_path, survivors, 1e-5)


def saving_script(expected: Expected, folder: Path) -> Script:
    """Return a script that saves after each step, and gathers the number of the step after the third one."""

    def main(session: Session, manager: SimulatedManager) -> list[Any]:
        bind(manager)
        gathered = []

        def save_and_gather() -> None:
            manager.run.note_step(session.done)
            session.save(folder / f"{manager.machine}-{session.done}.safetensors")
            if session.done == 3:
                gathered.append(session.gather(torch.tensor(session.done)).tolist())

        losses = train(session, expected.base, after_step=save_and_gather)
        return [losses, gathered]

    return main


@pytest.mark.parametrize("fault", [None, *(Fault("b", number, "die-after") for number in range(30, 42))])
def test_save_between_steps_works_while_a_worker_joins_or_dies(
    fault: Fault | None, tmp_path: Path, expected: Expected
) -> None:
    faults = [fault] if fault is not None else []
    run = SimulatedRun("abcd", saving_script(expected, tmp_path), later={"d": 2}, faults=faults)
    run.run()
    assert set(run.results) == set("acd" if faults else "abcd"), run.ends
    for machine, (losses, gathered) in run.results.items():
        assert losses == pytest.approx(expected.losses[-len(losses) :], abs=1e-6)
        assert gathered in ([[3, 3, 3]], [[3, 3]]) if machine != "d" else gathered == []
    for step in range(1, 7):
        saved = [load_file(path) for path in sorted(tmp_path.glob(f"?-{step}.safetensors"))]
        assert len(saved) >= 2 + (step > 3) * (not faults), step
        for each in saved[1:]:
            assert all(torch.equal(each[name], value) for name, value in saved[0].items())
    for name, value in expected.weights.items():
        assert torch.allclose(saved[0][name], value, atol=1e-6)


@pytest.mark.parametrize("operation", range(30, 42))
def test_gather_is_complete_on_all_workers_after_a_broken_link(
    operation: int, tmp_path: Path, expected: Expected
) -> None:
    """A worker that has its result already helps the others with its own part of it."""
    faults = [Fault("b", operation, "break-after")]
    run = SimulatedRun("abc", saving_script(expected, tmp_path), faults=faults)
    run.run()
    assert [gathered for _, gathered in run.results.values()] == [[[3, 3, 3]]] * 3


@pytest.mark.parametrize("leaving", ["bc", "ab", "abc", "d"])
def test_neighbours_that_leave_together_hand_their_state_over(
    leaving: str, tmp_path: Path, expected: Expected
) -> None:
    run = SimulatedRun("abcd", script(expected, tmp_path), leaves=dict.fromkeys(leaving, 2))
    run.run()
    staying = "".join(sorted(set("abcd") - set(leaving)))
    check(run, expected, tmp_path, staying)
    assert run.generations == ["abcd", staying]


def test_machine_that_is_lost_just_after_others_have_left_loses_nothing(
    tmp_path: Path, expected: Expected
) -> None:
    """Machine a gets the state of b and d, and a second machine has it when a dies."""
    once = SimulatedRun("abcd", script(expected, tmp_path), leaves={"b": 2, "d": 2})
    once.run()
    first = next(number for number, each in enumerate(once.operations["a"]) if each.generation == 2)
    for operation in range(first, first + 4):
        faults = [Fault("a", operation, "die")]
        run = SimulatedRun("abcd", script(expected, tmp_path), leaves={"b": 2, "d": 2}, faults=faults)
        run.run()
        check(run, expected, tmp_path, "c")


def test_learning_rates_come_from_any_member_that_trains(tmp_path: Path) -> None:
    """Only b trains; its mirror c is lost, and the first machine knows no learning rate."""
    expected = Expected(tmp_path / "alone", trained=[3])
    run = SimulatedRun("abc", script(expected, tmp_path), faults=[Fault("c", Vote(3), "die")])
    run.run()
    check(run, expected, tmp_path, "ab")


def random_run(seed: int, expected: Expected, folder: Path) -> SimulatedRun:
    """Return a run of unlike machines that join, leave, die and lose links at random operations."""
    source = random.Random(seed)
    names = "abcde"[: source.randint(2, 5)]
    memory = {name: source.choice([SMALL, MEMORY, 12000, 30000]) for name in names}
    is_limited = source.random() < 0.5 and max(memory.values()) == 30000
    memory[names[0]] = 30000  # so that the model fits when the run starts
    places = {names[1]: names[0]} if source.random() < 0.3 else {}
    kinds: tuple[Kind, ...] = ("die", "die-after", "break", "break-after")
    victims = source.sample(names, source.randint(0, 2))
    return SimulatedRun(
        names,
        script(expected, folder),
        later={names[-1]: source.randint(1, 4)} if source.random() < 0.4 and len(names) > 2 else {},
        leaves={names[0]: source.randint(1, 4)} if source.random() < 0.3 and len(names) > 2 else {},
        places=places,
        speeds={name: source.choice([1.0, 2.0, 30.0]) for name in names},
        probes=source.random() < 0.5,
        memory=memory if is_limited else {},
        faults=[Fault(name, source.randint(5, 90), source.choice(kinds)) for name in victims],
    )


@pytest.mark.slow
@pytest.mark.usefixtures("often_checked")
@pytest.mark.parametrize("seed", range(60))
def test_random_faults_change_no_result(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expected: Expected
) -> None:
    """Without a result are only machines that died, and those whose state has died with two machines.

    A machine that waits for memory gets it.
    """
    run = random_run(seed, expected, tmp_path)
    when_waiting(monkeypatch, get_memory)
    run.run()
    check(run, expected, tmp_path, "".join(run.results), 1e-5)
    dead = {run.place(name) for name, end in run.ends.items() if isinstance(end, Killed)}
    lost = [name for name, end in run.ends.items() if isinstance(end, StateLost)]
    if lost:
        assert len(dead) > 1 or run.results, (run.generations, run.ends)
