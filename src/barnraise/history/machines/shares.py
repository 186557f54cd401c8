"""Shares of the machines in the samples of a run. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from barnraise.history.entries import MachineSample, MembershipChange
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
    readings: Iterable[MachineSample],
    changes: Iterable[MembershipChange],
    samples_between: Callable[[float, float], int],
) -> tuple[MachineView, ...]:
    """Return the machines with shares of all samples of the run, which add up to 1.

    A reading's share holds since the reading before it, or since the machine came back after that.
    """
    known = sorted((reading for reading in readings if reading.share is not None), key=lambda each: each.at)
    returns: dict[bytes, list[float]] = defaultdict(list)
    for change in changes:
        returns[change.node].append(change.at)
    trained: dict[str, float] = {}
    last: dict[bytes, float] = {}
    for reading in known:
        joined_at = max((at for at in returns[reading.node] if at <= reading.at), default=0.0)
        samples = samples_between(max(last.get(reading.node, 0.0), joined_at), reading.at)
        node = reading.node.hex()
        trained[node] = trained.get(node, 0.0) + (reading.share or 0.0) * samples
        last[reading.node] = reading.at
    return _with(machines, trained, None)


def _with(
    machines: Sequence[MachineView], parts: Mapping[str, float], samples_per_s: float | None
) -> tuple[MachineView, ...]:
    total = sum(parts.values())
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
