"""Sampler of this machine: memory, temperature, power and load while it takes part in runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container

from barnraise.agent.context import AgentContext
from barnraise.core import devices
from barnraise.history.entries import Entry, LinkSample, MachineSample

_EVERY_S = 15.0
_LINKS_EVERY = 20  # samples


class MachineSampler:
    """Background task that gives samples to the records of this machine's active runs.

    ``known``: the runs that have not ended, also those that train nothing now. Each active run gets an equal
    part of the energy.
    """

    def __init__(
        self,
        context: AgentContext,
        active_runs: Callable[[], Collection[str]],
        known: Container[str],
        record: Callable[[str, list[Entry]], None],
        clock: Callable[[], float],
    ) -> None:
        self._context, self._active_runs, self._record, self._clock = context, active_runs, record, clock
        self._known = known
        self._energy: dict[str, float] = {}  # joules, by run

    async def run(self) -> None:
        """Take samples at intervals, until cancelled."""
        count = 0
        while True:
            runs = self._active_runs()
            self._energy = {run: energy for run, energy in self._energy.items() if run in self._known}
            if runs:
                sample = await asyncio.to_thread(self._context.metrics.devices.sample)
                at = self._clock()
                for run in runs:
                    energy = None
                    if sample.power_w is not None:
                        energy = self._energy.get(run, 0.0) + sample.power_w * _EVERY_S / len(runs)
                        self._energy[run] = energy
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
