"""Shares of the machines in the samples of a run. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from barnraise.history.entries import MembershipChange
from barnraise.history.view import MachineView


def with_recent_shares(
    machines: Sequence[MachineView], samples_per_s: float | None
) -> tuple[MachineView, ...]:
    """Return the machines with shares of the samples trained lately, which add up to 1.

    ``samples_per_s``: of the run. Each machine wrote its share for about the same quarter of a minute.
    """
    parts = {machine.node: machine.share for machine in machines if machine.share is not None}
    return _with(machines, parts, samples_per_s)


def with_total_shares(
    machines: Sequence[MachineView],
    readings: Mapping[bytes, Sequence[tuple[float, float]]],
    changes: Iterable[MembershipChange],
    samples_between: Callable[[float, float], int],
) -> tuple[MachineView, ...]:
    """Return the machines with shares of all samples of the run, which add up to 1.

    ``readings``: times and shares of each machine, in order. A share holds since the reading before it, or
    since the machine came back after that.
    """
    returns: dict[bytes, list[float]] = defaultdict(list)
    for change in changes:
        returns[change.node].append(change.at)
    trained: dict[str, float] = {}
    for node, known in readings.items():
        last = 0.0
        for at, share in known:
            joined_at = max((back for back in returns[node] if back <= at), default=0.0)
            samples = samples_between(max(last, joined_at), at)
            trained[node.hex()] = trained.get(node.hex(), 0.0) + share * samples
            last = at
    return _with(machines, trained, None)


def _with(
    machines: Sequence[MachineView], parts: Mapping[str, float], samples_per_s: float | None
) -> tuple[MachineView, ...]:
    total = math.fsum(parts.values())
    shares = {node: part / total for node, part in parts.items()} if total else {}
    return tuple(
        msgspec.structs.replace(
            machine,
            share=shares.get(machine.node),
            trained_per_s=shares[machine.node] * samples_per_s
            if samples_per_s and machine.node in shares
            else None,
        )
        for machine in machines
    )
