"""Members that report what cannot be true, or train something else, in a simulated run of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barnraise.core.errors import WorkerRefused
from barnraise.training.pipeline.holdings import MemberHoldings, StageVote
from barnraise.training.pipeline.members import handover
from barnraise.training.pipeline.prediction import placement_watch
from barnraise.training.pipeline.prediction.group_speeds import MemberSpeed
from barnraise.training.session import Session
from tests.unit.training.pipeline.simulated_run import SimulatedManager, SimulatedRun, bind, prepare
from tests.unit.training.pipeline.simulated_training import Expected, check, script
from tests.unit.training.pipeline.split_workers import train


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(tmp_path_factory.mktemp("alone"))


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


def lie(kind: type[msgspec.Struct], field: str, value: Any) -> Callable[[bytes], bytes]:
    """Return a change of messages: in those of a kind, a field has another value.

    Messages of two kinds may have equally many fields.
    """
    place, length = kind.__struct_fields__.index(field), len(kind.__struct_fields__)

    def change(message: bytes) -> bytes:
        try:
            msgspec.msgpack.decode(message, type=kind)
            fields = msgspec.msgpack.decode(message)
        except msgspec.DecodeError:
            return message
        if not isinstance(fields, list) or len(fields) != length:
            return message
        return msgspec.msgpack.encode([*fields[:place], value, *fields[place + 1 :]])

    return change


@pytest.mark.parametrize(
    "change",
    [
        lie(MemberHoldings, "done", 1 << 40),
        lie(MemberHoldings, "own", [99]),
        lie(MemberHoldings, "factor", 1e9),
        lie(MemberHoldings, "model", []),
        lie(MemberSpeed, "rates", [1.0] * 7),
        lie(MemberSpeed, "forward_s", float("nan")),
        lie(StageVote, "step", 1 << 40),
        lie(StageVote, "squared_norm", -1.0),
        lie(StageVote, "loss", 1.7e308),
        lie(StageVote, "fingerprint", b"other samples"),
    ],
)
def test_joining_worker_that_reports_what_cannot_be_is_refused_alone(
    change: Callable[[bytes], bytes], tmp_path: Path, expected: Expected
) -> None:
    run = SimulatedRun("abcd", script(expected, tmp_path), later={"d": 2}, lies={"d": change})
    run.run()
    check(run, expected, tmp_path, "abc")
    assert run.generations == ["abc", "abcd", "abc"]
    assert isinstance(run.ends["d"], WorkerRefused)
    assert "d is refused by the other workers: " in str(run.ends["d"])


@pytest.mark.parametrize(
    "change",
    [
        lie(MemberHoldings, "memory_bytes", 1 << 60),
        lie(MemberSpeed, "forward_s", 5e-324),
        lie(MemberSpeed, "around_s", 1e9),
        lie(MemberSpeed, "rates", [1e-308] * 3),
        lie(MemberSpeed, "latencies", [1e9] * 3),
        lie(StageVote, "block_s", 5e-324),
        lie(StageVote, "checkpoint_due", True),  # and no member has a disk
    ],
)
def test_impossible_figures_of_a_member_let_no_other_wait(
    change: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expected: Expected
) -> None:
    monkeypatch.setattr(placement_watch, "_STEPS", 1)  # the placement is checked after each step
    monkeypatch.setattr(placement_watch, "_SHARE", 1e9)
    run = SimulatedRun("abc", script(expected, tmp_path), probes=True, lies={"c": change})
    run.run()
    check(run, expected, tmp_path, "abc")
    assert run.generations == ["abc"]


def test_group_that_only_one_member_knows_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expected: Expected
) -> None:
    """A worker joins meanwhile as always."""
    monkeypatch.setattr(handover, "_AGENT_S", 0.0)
    change = lie(StageVote, "newest_generation", 1 << 40)
    run = SimulatedRun("abcd", script(expected, tmp_path), later={"d": 2}, lies={"c": change})
    run.run()
    check(run, expected, tmp_path, "abcd")
    assert run.generations == ["abc", "abcd"]


def test_joining_worker_that_trains_other_parameters_is_refused_alone(
    tmp_path: Path, expected: Expected
) -> None:
    """The others go on in the same step, and lose nothing that the refused one was to hold."""

    def main(session: Session, manager: SimulatedManager) -> list[float]:
        if manager.machine != "d":
            return list(script(expected, tmp_path)(session, manager))
        bind(manager)
        return train(session, expected.base, trained=[3])

    run = SimulatedRun("abcd", main, later={"d": 2})
    run.run()
    check(run, expected, tmp_path, "abc")
    assert run.generations == ["abc", "abcd", "abc"]
    assert "it trains 48 numbers, and a trains 240" in str(run.ends["d"])
