"""Sampler of this machine: memory, temperature, power and load while it takes part in runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from barnraise.agent.context import AgentContext
from barnraise.history.entries import Entry, LinkSample, MachineSample
from barnraise.topology.readings import read_machine

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
                readings = await asyncio.to_thread(read_machine)
                at = self._clock()
                for run in runs:
                    power = readings.power_w
                    if power is not None:
                        self._energy[run] += power * _EVERY_S
                    sample = MachineSample(
                        at=at,
                        node=self._context.me.raw,
                        used_bytes=readings.used_bytes,
                        temperature_c=readings.temperature_c,
                        power_w=power,
                        energy_j=self._energy[run] if power is not None else None,
                        load=readings.load,
                    )
                    links = [self._links(at)] if count % _LINKS_EVERY == 0 else []
                    self._record(run, [sample, *links])
                count += 1
            await asyncio.sleep(_EVERY_S)

    def _links(self, at: float) -> LinkSample:
        """Return the round-trip times to all connected machines."""
        links = []
        for node in self._context.linked_nodes():
            if (trip := self._context.round_trip(node)) is not None:
                links.append((self._context.me.raw, node.raw, 0.0, trip[0] * 1000))
        return LinkSample(at, tuple(links))
