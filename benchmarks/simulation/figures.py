"""Figures of a simulated training, the same as those measured of a real one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from barnraise.planning import ModelSize, StepTimes
from barnraise.planning.cost.quality_model import outer_rule
from barnraise.planning.inputs.codecs import LOSSY
from barnraise.runs.sharding import DataOrder
from barnraise.topology.graph import LinkFacts, NodeFacts, TopologyGraph, build_graph
from barnraise.training.autotune import tuner
from barnraise.training.autotune.tuner import GroupSample, SyncMode, SyncTuner
from barnraise.training.sync import Sync
from benchmarks.simulation.network import Link
from benchmarks.simulation.networks import World
from benchmarks.simulation.training import Committed, Costs, Training


class Figures(NamedTuple):
    """After the change to what was asked for: seconds of a batch, and the share of computing in them."""

    step_s: float
    utilisation: float
    sync: Sync

    @property
    def busy_s(self) -> float:
        return self.utilisation * self.step_s


def sync_named(text: str) -> Sync:
    """Parse ``exact``, or ``PERIOD:CODEC`` as in benchmarks/programs/planned.py."""
    if text == "exact":
        return Sync()
    period, _, codec = text.partition(":")
    known = next((candidate for candidate in LOSSY if candidate.name == codec), LOSSY[0])
    outer = outer_rule(known, int(period), is_lora=False)
    return Sync(period=int(period), codec=codec, rate=outer.learning_rate, momentum=outer.momentum)


def train(world: World, course: DataOrder, numbers: int, costs: Costs, sync: Sync | None = None) -> Training:
    """Create a training that is not started; with a ``sync`` the first member requests it from the start."""
    training = Training(world.clock, world.network, world.links, world.speeds, course, numbers, costs)
    training.wanted = sync if sync is not None and sync != Sync() else None
    return training


def run(training: Training, batches: int) -> None:
    training.begin()
    training.clock.run_until(lambda: sum(commit.batches for commit in training.commits) >= batches)


def figures(commits: Sequence[Committed], busy_s: float) -> Figures:
    """Compute figures as the program does, without the first commit of the requested mode.

    ``busy_s``: seconds of a batch if no member ever waited.
    """
    last = commits[-1].sync
    settled = [commit for commit in commits if commit.sync == last]
    counted = settled[1:] if len(settled) > 1 else settled
    seconds = sum(commit.seconds for commit in counted) / sum(commit.batches for commit in counted)
    return Figures(seconds, busy_s / seconds, last)


def fullest(wires: Sequence[Link], carried: Sequence[float], seconds: float) -> tuple[Link, float]:
    """Return the link that was busy for the largest share of the time, and that share."""
    loads = {link: size / link.rate for link, size in zip(wires, carried, strict=True)}
    link = max(loads, key=lambda link: loads[link])
    return link, loads[link] / seconds


class PlanningAtOnce(SyncTuner):
    """The session's own, without a thread: on a fake clock planning takes no time."""

    def _begin(self, seen: GroupSample, step_s: float, *, is_first: bool) -> None:
        self._known = frozenset(seen.nodes)
        self._plan_again(seen, step_s, is_first)


@contextmanager
def chosen_while_training(
    training: Training, model: ModelSize, profile: StepTimes, wish: SyncMode, graph: TopologyGraph
) -> Iterator[None]:
    """Plan on the first member after commits, as `Session` does."""
    nodes = [facts.node for facts in graph.nodes]

    def want(sync: Sync) -> None:
        training.wanted = sync

    def rest(resting: Sequence[str], why: str) -> None:
        for node in resting:
            training.rest(nodes.index(node))

    chooser = PlanningAtOnce(lambda: graph, model, profile, wish, want, rest, overlaps=training.overlaps)

    def note(made: Committed) -> None:
        speeds = tuple(training.pace.speeds) if training.pace.is_known else ()
        machines = tuple(nodes[member] for member in training.members)
        chooser.observe(
            GroupSample(training.generation, training.sync, speeds, machines, made.seconds / made.batches)
        )

    training.on_commit.append(note)
    # Simulated machines have the codec speeds that the planner assumes at first, not this machine's.
    with (
        mock.patch.object(tuner, "time", SimpleNamespace(monotonic=lambda: training.clock.now)),
        mock.patch.object(tuner, "measure_codecs", lambda codecs: codecs),
    ):
        yield


def graph_of(world: World) -> TopologyGraph:
    """Return the graph that agents would have measured of a flat world."""
    ids = [f"{number + 1:064x}" for number in range(len(world.cluster.members))]
    names = [member.name for member in world.cluster.members]
    by_name = dict(zip(names, ids, strict=True))
    return build_graph(
        (NodeFacts(node=node, name=name) for node, name in zip(ids, names, strict=True)),
        (
            LinkFacts(
                a=by_name[path.source],
                b=by_name[path.target],
                rtt_s=2 * path.latency_s,
                mbps=path.mbps,
                measured_s_ago=0.0,
            )
            for path in world.cluster.paths
            if by_name[path.source] < by_name[path.target]
        ),
    )
