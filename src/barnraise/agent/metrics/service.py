"""Metrics service of an agent: collects the values of all processes of the machine, and serves monitors."""

from __future__ import annotations

import asyncio
import logging
import shutil
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from barnraise import __version__
from barnraise.agent.metrics.agent_values import agent_samples, device_samples
from barnraise.agent.metrics.endpoint import MetricsEndpoint, Page
from barnraise.agent.metrics.health import HealthFacts, judge_health
from barnraise.agent.metrics.process_values import ProcessTable
from barnraise.agent_client.metrics.requests import (
    MAX_ANSWERED,
    HealthResponse,
    MetricsReport,
    MetricsResponse,
)
from barnraise.core import metrics
from barnraise.core.devices import DeviceSampler
from barnraise.core.metrics import Sample, catalogue
from barnraise.identity import NodeId

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

    def health(self, *, is_for_worker: bool = False) -> HealthResponse:
        """Return the health of this agent. A worker learns how many machines there are, not which ones."""
        agent, now = self._agent, self._loop.time()
        view, members = agent.member.view, agent.log.members
        verdict = judge_health(HealthFacts(agent.blocked_reason(), self._silent_machines(now), self._free()))
        response = HealthResponse(
            state=verdict.state,
            problems=verdict.problems,
            machine=agent.name_of(agent.me),
            cluster=agent.cluster_name,
            version=__version__,
            up_s=now - agent.started,
            online=sum(view.of(node.raw) is not None for node in members),
            machines=len(members),
            runs=len(agent.runs.executors),
            paused=agent.limits.shown_reason,
        )
        if is_for_worker:
            return msgspec.structs.replace(response, problems=(), machine="", cluster="", paused="")
        return response

    def _silent_machines(self, now: float) -> tuple[str, ...]:
        member = self._agent.member
        nodes = [node for node in map(NodeId, member.view.nodes) if node != self._agent.me]
        peers = [(node, member.peers.get(node.raw)) for node in nodes]
        return tuple(
            self._agent.name_of(node) for node, peer in peers if peer is None or peer.is_suspect(now)
        )

    def _free(self) -> int | None:
        try:
            return shutil.disk_usage(self._agent.directory).free
        except OSError:
            return None

    async def _collect(self) -> list[Sample]:
        machine = await asyncio.to_thread(self.devices.sample)
        now = self._loop.time()
        return [
            *agent_samples(self._agent, now),
            *metrics.registry.samples(),
            *device_samples(machine),
            *self._table.samples(now),
        ]

    async def _metrics_page(self) -> Page:
        return Page("200 OK", CONTENT_TYPE_LATEST, metrics.render(await self._collect()))

    async def _health_page(self) -> Page:
        health = self.health()
        status = "503 Service Unavailable" if health.state == "failing" else "200 OK"
        return Page(status, "application/json", msgspec.json.encode(health) + b"\n")

    def _open(self, port: int) -> None:
        try:
            self._endpoint = MetricsEndpoint(
                port, {"/metrics": self._metrics_page, "/health": self._health_page}
            )
        except OSError as error:
            self._agent.report_event(
                f"the metrics are not served: port {port} of 127.0.0.1 cannot be opened "
                f"({error.strerror or error}); change metrics.port in the settings"
            )
