"""Speeds of links in a group: what agents have measured, and what the group measures itself."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from barnraise.core.errors import AgentError, PeerLost
from barnraise.topology.graph import LinkFacts, NodeFacts, TopologyGraph, build_graph
from barnraise.training.pipeline.prediction import group_speeds
from barnraise.training.pipeline.prediction.group_speeds import (
    LinkMeter,
    MemberSpeed,
    combine_links,
    rounds_of,
    unknown_pairs,
)

NODES = ("aa", "bb", "cc")


class Wire:
    """Messages between the threads of a test, and a clock of each rank that its sends move."""

    def __init__(self, world: int) -> None:
        self.messages: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.gathered: list[list[bytes]] = [[] for _ in range(world)]
        self.barrier = threading.Barrier(world, timeout=20.0)
        self.changed = threading.Condition()
        self.sent: list[tuple[int, int, int]] = []


class Group:
    """The group of one thread."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        self.wire.gathered[self.rank] = [message]
        self.wire.barrier.wait()
        messages = [each[0] for each in self.wire.gathered]
        self.wire.barrier.wait()
        return messages

    def send_async(self, tensor: torch.Tensor, to: int) -> Any:
        with self.wire.changed:
            self.wire.messages[self.rank, to].append(tensor)
            self.wire.sent.append((self.rank, to, len(tensor)))
            self.wire.changed.notify_all()
        # Of a round trip of 2 ms the answer takes nothing; an offer and its answer take one more.
        self.now += 0.002 if len(tensor) < 100 else 0.004 + len(tensor) / (1e6 * (self.rank + 1))
        return Done()

    def receive_async(self, tensor: torch.Tensor, sender: int) -> Any:
        def wait() -> None:
            with self.wire.changed:
                assert self.wire.changed.wait_for(lambda: self.wire.messages[sender, self.rank], 20.0)
                message = self.wire.messages[sender, self.rank].popleft()
            assert len(message) == len(tensor)

        return Done(wait)


class Done:
    """A finished operation, or one that waits."""

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self.wait = wait


class Manager:
    """The manager of one thread; ``graph``: what its agent has measured."""

    def __init__(self, group: Group, graph: TopologyGraph | None, nodes: Sequence[str]) -> None:
        self.group, self.rank, self._graph, self._nodes = group, group.rank, graph, nodes

    def machines(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def name_of(self, rank: int) -> str:
        return self._nodes[rank]

    def survey(self) -> TopologyGraph:
        if self._graph is None:
            raise AgentError("no agent answers", hint="Start it.")
        return self._graph


def exchange(
    monkeypatch: pytest.MonkeyPatch,
    graphs: Sequence[TopologyGraph | None],
    nodes: Sequence[str] = NODES,
    times: int = 1,
) -> tuple[list[Any], Wire]:
    """Let all ranks exchange their speeds, and return the last results."""
    wire = Wire(len(nodes))
    groups = [Group(wire, rank) for rank in range(len(nodes))]
    local = threading.local()

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return float(groups[local.rank].now)

    monkeypatch.setattr(group_speeds, "time", Clock)
    results: list[Any] = [None] * len(nodes)

    def work(rank: int) -> None:
        local.rank = rank
        meter = LinkMeter(Manager(groups[rank], graphs[rank], nodes), 1 << 16)  # type: ignore[arg-type]
        for _ in range(times):
            results[rank] = meter.exchange(MemberSpeed(rank + 1.0, 2.0))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert all(results), "a rank has failed"
    return results, wire


def graph_of(*links: tuple[str, str, float | None]) -> TopologyGraph:
    facts = [NodeFacts(node=node, name=node) for node in NODES]
    return build_graph(facts, [LinkFacts(a=a, b=b, rtt_s=0.01, mbps=mbps) for a, b, mbps in links])


def test_links_that_agents_have_measured_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(a, b, 80.0) for a, b in itertools.combinations(NODES, 2)]
    results, wire = exchange(monkeypatch, [graph_of(*pairs), TopologyGraph(), None])
    assert wire.sent, "the link between the second and the third is known to neither of them"
    results, wire = exchange(monkeypatch, [graph_of(*pairs), graph_of(*pairs), None])
    assert wire.sent == []
    assert all(result == results[0] for result in results)
    links = results[0].links
    assert links.rates == ((1e9, 1e7, 1e7), (1e7, 1e9, 1e7), (1e7, 1e7, 1e9))
    assert links.latencies[2] == (0.005, 0.005, 0.0)
    assert [member.block.forward_s for member in results[0].members] == [1.0, 2.0, 3.0]


def test_unknown_links_are_measured_once_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    results, wire = exchange(monkeypatch, [graph_of(("aa", "bb", 80.0), ("aa", "cc", None))] * 3, times=3)
    assert all(result == results[0] for result in results)
    links = results[0].links
    assert links.rates[0] == (1e9, 1e7, pytest.approx(1e6, rel=0.01))
    assert links.rates[2][0] == pytest.approx(3e6, rel=0.01)
    assert links.rates[2][1] == pytest.approx(3e6, rel=0.01)
    assert links.latencies[0][2] == pytest.approx(0.001)
    long = sorted((sender, to) for sender, to, size in wire.sent if size > 100)
    assert long == sorted(2 * [(0, 2), (2, 0), (1, 2), (2, 1)]), "the three exchanges measured once"


def test_workers_of_one_machine_have_a_fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    results, wire = exchange(monkeypatch, [None, None], ("aa", "aa"))
    assert wire.sent == []
    assert results[0].links.rates == ((1e9, 1e9), (1e9, 1e9))


@pytest.mark.parametrize(
    "odd",
    [
        MemberSpeed(rates=(0.0,), latencies=(0.0, 0.0)),
        MemberSpeed(rates=(0.0, 0.0), latencies=(0.0,)),
    ],
)
def test_member_that_reports_another_number_of_links_is_refused(odd: MemberSpeed) -> None:
    good = MemberSpeed(rates=(0.0, 0.0), latencies=(0.0, 0.0))
    answers = [msgspec.msgpack.encode(each) for each in (good, odd)]
    group: Any = SimpleNamespace(rank=0, all_gather_bytes=lambda message: answers)
    manager: Any = SimpleNamespace(rank=0, world=2, group=group, name_of=lambda rank: NODES[rank])
    with pytest.raises(PeerLost, match="bb is refused by the other workers: it reports") as caught:
        LinkMeter(manager, 1)._gather(good)
    assert caught.value.peer == 1


def test_impossible_figures_count_as_possible_ones_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    good = MemberSpeed(1.0, 2.0, rates=(1e9, 1e7), latencies=(0.0, 0.1))
    lie = MemberSpeed(5e-324, 2.0, rates=(1e-308, 1e15), latencies=(1e9, 0.0))
    answers = [msgspec.msgpack.encode(each) for each in (good, lie)]
    group: Any = SimpleNamespace(rank=0, all_gather_bytes=lambda message: answers)
    manager: Any = SimpleNamespace(rank=0, world=2, group=group, name_of=lambda rank: NODES[rank])
    assert LinkMeter(manager, 1)._gather(good) == [
        good,
        MemberSpeed(1e-6, 2.0, rates=(1e3, 1e12), latencies=(10.0, 0.0)),
    ]
    assert caplog.messages == ["bb reports speeds that no machine has; the nearest possible ones count"]


def test_report_is_bounded() -> None:
    decoder = msgspec.msgpack.Decoder(MemberSpeed)
    for value in ([-1.0], [float("inf")], [float("nan")], [0.0] * 5 + [[1.0] * 2000]):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(msgspec.msgpack.encode(value))


def test_pairs_are_measured_in_rounds_without_a_common_rank() -> None:
    pairs = list(itertools.combinations(range(6), 2))
    rounds = rounds_of(pairs)
    assert sorted(pair for each in rounds for pair in each) == pairs
    for each in rounds:
        ranks = [rank for pair in each for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len(rounds) <= 8


def test_other_end_stands_for_what_a_member_does_not_know() -> None:
    members = [
        MemberSpeed(rates=(1e9, 5.0, 0.0), latencies=(0.0, 0.1, 0.0)),
        MemberSpeed(rates=(0.0, 1e9, 0.0), latencies=(0.0, 0.0, 0.0)),
        MemberSpeed(rates=(0.0, 0.0, 1e9), latencies=(0.0, 0.0, 0.0)),
    ]
    assert unknown_pairs(members) == [(0, 2), (1, 2)]
    links = combine_links(members)
    assert links.rates[1] == (5.0, 1e9, 0.0)
    assert links.latencies[1][0] == 0.1
    assert links.transfer_s(1, 2, 100.0) == 0.0


def test_no_member_alone_makes_a_link_slow() -> None:
    members = [
        MemberSpeed(rates=(1e9, 5.0), latencies=(0.0, 0.1)),
        MemberSpeed(rates=(6.0, 1e9), latencies=(10.0, 0.0)),
    ]
    assert combine_links(members).latencies == ((0.0, 0.1), (0.1, 0.0))
