"""Network of simulated hosts: actions in their order, and an end to what waits when its thread fails."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from barnraise.collectives.messages import Failure, Reply
from barnraise.testing.network import SimulatedNetwork, worker_id


class Owner:
    """Rank that only notes that its network is gone."""

    def __init__(self) -> None:
        self.lost: list[Failure] = []
        self.over = threading.Event()

    def handle(self, reply: Reply) -> None:
        raise AssertionError(f"an engine without groups replied {reply}")

    def lose(self, failure: Failure) -> None:
        self.lost.append(failure)
        self.over.set()


def test_actions_run_in_order_on_one_thread_before_the_end() -> None:
    network = SimulatedNetwork(lambda sender, receiver: 0.0)
    network.add(0, Owner())
    network.start()
    seen: list[tuple[int, str]] = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    for number in range(100):
        network.call(partial(note, number))
    network.close()
    assert seen == [(number, "simulated-network") for number in range(100)]


def test_hosts_get_one_link_however_often_they_dial() -> None:
    network = SimulatedNetwork(lambda sender, receiver: 0.0)
    hosts = [network.add(rank, Owner()) for rank in range(2)]
    network.start()
    for _ in range(3):
        network.call(lambda: network.connect(hosts[1], worker_id(0)))
    network.close()
    assert [len(host.links) for host in hosts] == [1, 1]
    assert hosts[0].engine.peers.get(worker_id(1)) is not None


def test_failure_of_the_thread_reaches_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    network = SimulatedNetwork(lambda sender, receiver: 0.0)
    owners = [Owner(), Owner()]
    for rank, owner in enumerate(owners):
        network.add(rank, owner)
    network.start()

    def fail() -> None:
        raise KeyError("unexpected")

    network.call(fail)
    for owner in owners:
        assert owner.over.wait(20)
        (failure,) = owner.lost
        assert failure.code == "comm-process-lost"
        assert "KeyError('unexpected')" in failure.message
    assert "the simulated network failed" in caplog.text
    network.close()
