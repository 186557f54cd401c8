"""Metrics service of an agent: collects the values of all processes of the machine, and serves Prometheus."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from barnraise.agent.metrics.agent_values import agent_samples, device_samples
from barnraise.agent.metrics.endpoint import MetricsEndpoint
from barnraise.agent.metrics.process_values import ProcessTable
from barnraise.agent_client.metrics.requests import MAX_ANSWERED, MetricsReport, MetricsResponse
from barnraise.core import metrics
from barnraise.core.devices import DeviceSampler
from barnraise.core.metrics import Sample, catalogue

if TYPE_CHECKING:
    from barnraise.agent.daemon import Agent

log = logging.getLogger(__name__)

_FORGET_S = 5.0


class MetricsService:
    """All metrics of one machine. ``devices``: the one sampler of the agent, also for other services."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._table = ProcessTable()
        self._endpoint: MetricsEndpoint | None = None
        self.devices = DeviceSampler()
        metrics.counter(catalogue.AGENT_LINK_LOSSES)  # shown from 0 on: `increase()` needs its first value

    async def run(self) -> None:
        """Open the endpoint if the settings ask for it, and forget runs that have ended, until cancelled."""
        port = self._agent.settings.metrics.port
        try:
            if port:
                self._open(port)
            while True:
                await asyncio.sleep(_FORGET_S)
                self._table.keep_only(self._agent.runs.executors)
        finally:
            if self._endpoint is not None:
                await self._endpoint.close()
            self.devices.close()

    def received(self, report: MetricsReport) -> None:
        """Note the values that a worker has reported."""
        if report.run in self._agent.runs.executors:
            for values in report.processes:
                self._table.update(report.run, report.local_rank, values, self._loop.time())

    async def answer(self) -> MetricsResponse:
        """Return all values for the command line, without those of buckets."""
        samples = [each for each in await self._collect() if not each.name.endswith("_bucket")]
        port = self._endpoint.port if self._endpoint is not None else 0
        return MetricsResponse(tuple(samples[:MAX_ANSWERED]), port)

    async def _collect(self) -> list[Sample]:
        machine = await asyncio.to_thread(self.devices.sample)
        now = self._loop.time()
        return [
            *agent_samples(self._agent, now),
            *metrics.registry.samples(),
            *device_samples(machine),
            *self._table.samples(now),
        ]

    async def _text(self) -> bytes:
        return metrics.render(await self._collect())

    def _open(self, port: int) -> None:
        try:
            self._endpoint = MetricsEndpoint(port, self._text)
        except OSError as error:
            self._agent.report_event(
                f"the metrics are not served: port {port} of 127.0.0.1 cannot be opened "
                f"({error.strerror or error}); change metrics.port in the settings"
            )
