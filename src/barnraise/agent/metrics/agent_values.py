"""Values that the agent reads when asked: cluster, runs, links, disk and devices as they are now."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import psutil

from barnraise import __version__
from barnraise.core.devices import MachineSample
from barnraise.core.metrics import Sample, Series, catalogue
from barnraise.transport.listener.preface import AGENT_ROUTES, ROUTE_NAMES

if TYPE_CHECKING:
    from barnraise.agent.daemon import Agent


def agent_samples(agent: Agent, now: float) -> list[Sample]:
    """Return the gauges of the agent. They are read now, so they cannot be out of date."""
    gauges = [*_process(agent), *_cluster(agent, now), *_links(agent), *_runs(agent), *_disk(agent)]
    return [Sample(series.name, labels, float(value)) for series, labels, value in gauges]


def device_samples(machine: MachineSample) -> list[Sample]:
    """Return the values of all devices; what a device cannot tell has no value."""
    samples: list[Sample] = []

    def add(series: Series, value: float | None, *labels: str) -> None:
        if value is not None:
            samples.append(Sample(series.name, labels, float(value)))

    for device in machine.devices:
        labels = (device.name, device.model)
        add(catalogue.DEVICE_UTILIZATION, device.utilization, *labels)
        add(catalogue.DEVICE_MEMORY_USED, device.memory_used, *labels)
        add(catalogue.DEVICE_MEMORY_SIZE, device.memory_total, *labels)
        add(catalogue.DEVICE_TEMPERATURE, device.temperature_c, *labels)
        add(catalogue.DEVICE_POWER, device.power_w, *labels)
    if machine.battery is not None:
        add(catalogue.BATTERY_CHARGE, machine.battery.charge)
        add(catalogue.BATTERY_POWER, machine.battery.power_w)
    return samples


_Value = tuple[Series, tuple[str, ...], float]


def _process(agent: Agent) -> Iterator[_Value]:
    process = psutil.Process()
    times = process.cpu_times()
    yield catalogue.AGENT_INFO, (__version__,), 1
    yield catalogue.AGENT_START, (), process.create_time()
    yield catalogue.AGENT_CPU, (), times.user + times.system
    yield catalogue.AGENT_MEMORY, (), process.memory_info().rss
    yield catalogue.PAUSED, (), bool(agent.limits.shown_reason)


def _cluster(agent: Agent, now: float) -> Iterator[_Value]:
    view, members = agent.member.view, agent.log.members
    online = sum(view.of(node.raw) is not None for node in members)
    yield catalogue.MACHINES, ("online",), online
    yield catalogue.MACHINES, ("offline",), len(members) - online
    yield catalogue.CLUSTER_DECIDES, (), agent.member.quorum_status(now).decides
    yield from _counted(catalogue.JOBS, (job.record.state for job in agent.queue.registry.jobs.values()))


def _links(agent: Agent) -> Iterator[_Value]:
    nodes = [node for node in agent.log.members if node != agent.me]
    for route in AGENT_ROUTES:
        count = sum(agent.connections.get(node, route) is not None for node in nodes)
        yield catalogue.AGENT_LINKS, (ROUTE_NAMES[route],), count
    for node in nodes:
        trip = agent.round_trip(node)
        if trip is not None:
            yield catalogue.AGENT_ROUND_TRIP, (agent.name_of(node),), trip[0]


def _runs(agent: Agent) -> Iterator[_Value]:
    executors = list(agent.runs.executors.values())
    yield catalogue.RUNS, (), len(executors)
    yield catalogue.WORKERS, (), sum(executor.running_workers for executor in executors)


def _disk(agent: Agent) -> Iterator[_Value]:
    used = agent.cleaner.disk
    if used is not None:
        yield catalogue.DISK_USED, ("runs",), used.runs
        yield catalogue.DISK_USED, ("files",), used.files
        yield catalogue.DISK_USED, ("environments",), used.environments
    yield catalogue.DISK_FREE, (), shutil.disk_usage(agent.directory).free


def _counted(series: Series, words: Iterable[str]) -> Iterator[_Value]:
    for word, count in Counter(words).items():
        yield series, (word,), count
