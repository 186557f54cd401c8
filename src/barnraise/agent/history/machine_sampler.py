"""Sampler of this machine: memory, temperature, power and load while it takes part in runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from barnraise.agent.context import AgentContext
from barnraise.core import devices
from barnraise.history.entries import Entry, LinkSample, MachineSample

_EVERY_S = 15.0
_LINKS_EVERY = 20  # samples


class MachineSampler:
    """Background task that gives samples to the records of this machine's active runs."""

    def __init__(
        self,
        context: AgentContext,
        active_runs: Callable[[], Collection[str]],
        record: Callable[[str, list[Entry]], None],
        clock: Callable[[], float],
    ) -> None:
        self._context, self._active_runs, self._record, self._clock = context, active_runs, record, clock
        self._energy: dict[str, float] = {}  # joules, by run

    async def run(self) -> None:
        """Take samples at intervals, until cancelled."""
        count = 0
        while True:
            runs = self._active_runs()
            self._energy = {run: self._energy.get(run, 0.0) for run in runs}
            if runs:
                sample = await asyncio.to_thread(self._context.metrics.devices.sample)
                at = self._clock()
                for run in runs:
                    power = sample.power_w
                    if power is not None:
                        self._energy[run] += power * _EVERY_S
                    energy = self._energy[run] if power is not None else None
                    entry = to_entry(sample, at, self._context.me.raw, energy)
                    links = [self._links(at)] if count % _LINKS_EVERY == 0 else []
                    self._record(run, [entry, *links])
                count += 1
            await asyncio.sleep(_EVERY_S)

    def _links(self, at: float) -> LinkSample:
        """Return the round-trip times to all connected machines."""
        links = []
        for node in self._context.linked_nodes():
            if (trip := self._context.round_trip(node)) is not None:
                links.append((self._context.me.raw, node.raw, 0.0, trip[0] * 1000))
        return LinkSample(at, tuple(links))


def to_entry(sample: devices.MachineReading, at: float, node: bytes, energy_j: float | None) -> MachineSample:
    """Return an entry of the record: sums of memory, the highest temperature and the mean load. Pure."""
    computing = sample.computing
    used = [device.memory_used for device in computing if device.memory_used is not None]
    heat = [device.temperature_c for device in computing if device.temperature_c is not None]
    load = [device.utilization for device in computing if device.utilization is not None]
    return MachineSample(
        at=at,
        node=node,
        used_bytes=float(sum(used)) if used else None,
        temperature_c=max(heat, default=None),
        power_w=sample.power_w,
        energy_j=energy_j,
        load=sum(load) / len(load) if load else None,
    )
