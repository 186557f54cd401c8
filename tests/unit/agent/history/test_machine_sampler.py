"""Energy of a run: its part of what the machine used, also through a restart of the group."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from barnraise.agent.history import machine_sampler
from barnraise.agent.history.machine_sampler import MachineSampler
from barnraise.history.entries import Entry, MachineSample
from benchmarks.invented_run import DESK


def test_runs_share_the_energy_and_keep_it_while_they_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_sampler, "_EVERY_S", 0.001)
    reading = SimpleNamespace(power_w=8000.0, computing=())
    context: Any = SimpleNamespace(
        me=SimpleNamespace(raw=DESK),
        linked_nodes=tuple,
        metrics=SimpleNamespace(devices=SimpleNamespace(sample=lambda: reading)),
    )
    turns: list[tuple[str, ...]] = [("a",), (), ("a", "b"), ("b",)]
    known = {"a", "b"}
    energies: list[tuple[str, float | None]] = []

    def active() -> Collection[str]:
        if not turns:
            raise asyncio.CancelledError
        if len(turns) == 1:
            known.remove("a")
        return turns.pop(0)

    def record(run: str, entries: list[Entry]) -> None:
        energies.extend((run, entry.energy_j) for entry in entries if isinstance(entry, MachineSample))

    sampler = MachineSampler(context, active, known, record, lambda: 1.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(sampler.run())
    assert energies == [("a", 8.0), ("a", 12.0), ("b", 4.0), ("b", 12.0)]
    assert list(sampler._energy) == ["b"]
