"""Answers of the agent about the machines of a run: those that took part, and reasons of the others."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from barnraise.agent.api.runs_api import _machines_of, _shown_findings
from barnraise.agent_client.run_options import RunProgram
from barnraise.environments.compatibility import CompatibilityFinding
from barnraise.identity import NodeKey
from barnraise.runs.record import LeftOutNode, RunRecord, RunSpec, WorkerSlot

MAC, PC, NAS = (NodeKey.generate().id.raw for _ in range(3))
PROGRAM = RunProgram(command=("train.py",), folder=b"")
ORDER = RunSpec(run="train-abcd", by=MAC, at=0, program=PROGRAM, nodes=(MAC, PC, NAS))
RECORD = RunRecord(order=b"order", signature=bytes(64))


def test_machines_of_an_ended_run_are_all_that_took_part_and_not_the_last_one() -> None:
    """Workers finish one after the other, so the last group may have one machine."""
    running = replace(RECORD, phase="running", slots=(WorkerSlot(PC, 0, "cpu"),))
    assert list(_machines_of(running, ORDER)) == [PC]
    ended = replace(running, phase="ended")
    assert list(_machines_of(ended, ORDER)) == [MAC, PC, NAS]
    assert list(
        _machines_of(replace(ended, left_out=(LeftOutNode(NAS, "no torch", may_join=False),)), ORDER)
    ) == [MAC, PC]


def finding(level: Literal["impossible", "risky"], node: str) -> CompatibilityFinding:
    return CompatibilityFinding(level=level, about="package", node=node, sentence=f"{node} lacks timm.")


def test_reason_of_a_machine_that_is_left_out_is_not_repeated_as_a_finding() -> None:
    findings = (finding("impossible", "pc"), finding("risky", "nas"))
    (line,) = _shown_findings(findings, {"pc"})
    assert "nas lacks timm." in line
    assert _shown_findings(findings[:1], {"pc"}) == ()
