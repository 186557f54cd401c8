"""Channel of a simulated rank: it counts, dies once, cuts timeouts, and fails what waits at its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from barnraise.collectives.messages import (
    Failure,
    GroupOpened,
    OperationFailed,
    OperationFinished,
    OperationSpec,
    StartOperation,
)
from barnraise.collectives.ops.dtypes import by_name
from barnraise.collectives.shm.segment import SharedSegment
from barnraise.core.config import Settings
from barnraise.core.errors import CommProcessLost, OperationAborted, OperationTimeout
from barnraise.testing.network import SimulatedNetwork
from barnraise.testing.rank_channel import RankChannel, RankKilled

LIMIT_S = 0.5


class Ranks:
    """Two channels over one network, and the group that both have opened."""

    def __init__(self) -> None:
        self.network = SimulatedNetwork(lambda sender, receiver: 0.0)
        self.channels = [
            RankChannel(self.network, 0, Settings(), LIMIT_S),
            RankChannel(self.network, 1, Settings(), LIMIT_S, dies_before=3),
        ]
        self.network.start()

    def open(self) -> list[GroupOpened]:
        members = tuple(channel.member for channel in self.channels)
        opened: dict[int, GroupOpened] = {}

        def run(rank: int) -> None:
            opened[rank] = self.channels[rank].open_group("group", rank, members, 60.0, None, 0)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return [opened[0], opened[1]]

    def barrier(self, rank: int, group: int, timeout_s: float = 60.0) -> Outcome:
        channel, outcome = self.channels[rank], Outcome()
        number = channel.next_id()
        specification = OperationSpec("barrier", by_name("uint8").code, "", -1, "doubling", (), 1 << 20, 2)
        channel.submit(
            StartOperation(number, group, 0, specification, 0, 0, 0, timeout_s), number, outcome.note
        )
        return outcome


class Outcome:
    """Reply to an operation, which arrives on another thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._reply: OperationFinished | OperationFailed | None = None

    def note(self, reply: OperationFinished | OperationFailed) -> None:
        assert self._reply is None
        self._reply = reply
        self._event.set()

    def wait(self) -> Failure | None:
        assert self._event.wait(20)
        return self._reply.failure if isinstance(self._reply, OperationFailed) else None


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    for channel in made.channels:
        channel.map_segment(0, SharedSegment.create(4096))
    yield made
    for channel in made.channels:
        channel.abandon()
    made.network.close()
    assert not made.network._thread.is_alive()


def test_group_opens_with_equal_costs_and_runs_operations(ranks: Ranks) -> None:
    first, second = ranks.open()
    assert first.group == second.group
    assert first.table == second.table
    assert first.links == ("in memory",)
    outcomes = [ranks.barrier(rank, first.group) for rank in range(2)]
    assert [outcome.wait() for outcome in outcomes] == [None, None]


def test_group_without_its_other_rank_names_it(ranks: Ranks) -> None:
    members = tuple(channel.member for channel in ranks.channels)
    with pytest.raises(OperationTimeout, match="rank 1 did not enter the group within 0.5 s"):
        ranks.channels[0].open_group("group", 0, members, 60.0, None, 0)


def test_operation_times_out_at_the_limit(ranks: Ranks) -> None:
    group = ranks.open()[0].group
    failure = ranks.barrier(0, group, timeout_s=3600.0).wait()
    assert failure is not None
    assert (failure.code, failure.late) == ("operation-timeout", (1,))


def test_rank_dies_before_its_operation_and_stays_dead(ranks: Ranks) -> None:
    group = ranks.open()[0].group
    waiting = ranks.barrier(0, group)
    channel = ranks.channels[1]
    channel.check_usable()
    channel.check_usable()
    assert not channel.is_killed
    for _ in range(2):
        with pytest.raises(RankKilled, match="rank 1 was killed before its operation 3"):
            channel.check_usable()
    assert channel.is_killed
    failure = waiting.wait()
    assert failure is not None
    assert (failure.code, failure.peer, failure.message) == ("peer-lost", 1, "its process exited")
    with pytest.raises(CommProcessLost, match="rank 1 was killed"):
        channel.open_group("other", 0, (channel.member,), 60.0, None, 0)


def test_rank_that_leaves_closes_its_groups(ranks: Ranks) -> None:
    group = ranks.open()[0].group
    waiting = ranks.barrier(0, group)
    ranks.channels[1].leave()
    failure = waiting.wait()
    assert failure is not None
    assert (failure.code, failure.peer, failure.message) == ("peer-lost", 1, "it closed the group")


def test_abandoned_rank_fails_what_waits_and_what_comes(ranks: Ranks) -> None:
    group = ranks.open()[0].group
    waiting = ranks.barrier(0, group)
    ranks.channels[0].abandon()
    failure = waiting.wait()
    assert failure is not None
    assert (failure.code, failure.message) == ("operation-aborted", "the simulation is over")
    later = ranks.barrier(0, group).wait()
    assert later == failure
    with pytest.raises(OperationAborted, match="the simulation is over"):
        ranks.channels[0].check_usable()
