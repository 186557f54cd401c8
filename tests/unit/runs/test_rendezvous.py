"""Rendezvous of processes in the store: which process gets which rank."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from barnraise.agent_client.kv_client import KvClient, agent_at
from barnraise.agent_client.kv_messages import LOBBY, Namespace
from barnraise.core.errors import BarnraiseError, ConfigError, OperationTimeout
from barnraise.runs import rendezvous
from barnraise.runs.rendezvous import RankPlace, RankRequest, Rendezvous
from tests.unit.kvstore.kv_servers import KvServers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="written with care, not run there yet")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[KvServers]:
    monkeypatch.setattr(rendezvous, "CONFIRM_S", 1.0)
    with tempfile.TemporaryDirectory(prefix="by-") as directory, KvServers(Path(directory)) as servers:
        yield servers


class Processes:
    """Processes as threads, each with a given request."""

    def __init__(self, servers: KvServers) -> None:
        self.servers = servers
        self.results: dict[str, RankPlace | BarnraiseError] = {}
        self.threads: list[threading.Thread] = []
        self.notes: list[str] = []

    def store(self) -> KvClient:
        return KvClient(agent_at(self.servers.directories[0]), Namespace("script.py", LOBBY), 60.0)

    def seats(self) -> tuple[str, ...]:
        return tuple(seat.process for seat in rendezvous._read(self.store().get("table") or b"").seats)

    def come(
        self,
        name: str,
        claim: Callable[[], RankRequest],
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        def run() -> None:
            coming = Rendezvous(self.store(), name, claim, clock, self.notes.append)
            try:
                self.results[name] = coming.arrive(timeout_s)
            except BarnraiseError as error:
                self.results[name] = error

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def all(self) -> dict[str, RankPlace | BarnraiseError]:
        for thread in self.threads:
            thread.join(90)
        results, self.results, self.threads = self.results, {}, []
        return results

    def places(self) -> dict[str, RankPlace]:
        places = {}
        for name, result in self.all().items():
            assert isinstance(result, RankPlace), result
            places[name] = result
        return places


@pytest.fixture
def processes(servers: KvServers) -> Processes:
    return Processes(servers)


def claims(world: int, *, fixed: bool = False, rank: int | None = None) -> Callable[[], RankRequest]:
    return lambda: RankRequest(world, fixed, rank)


def test_processes_started_together_share_a_generation_and_a_later_start_gets_a_later_one(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "CONFIRM_S", 20.0)
    monkeypatch.setattr(rendezvous, "_KEPT", 4)
    generations = []
    for _ in range(3):
        for name in "abcd":
            processes.come(name, claims(4))
        places = processes.places().values()
        assert sorted(place.rank for place in places) == [0, 1, 2, 3]
        assert {place.world for place in places} == {4}
        (generation,) = {place.generation for place in places}
        generations.append(generation)
    assert generations == sorted(set(generations))
    assert processes.store().count() < 20, "old keys are deleted"


def test_single_process_does_not_wait(processes: Processes) -> None:
    processes.come("a", claims(1))
    assert processes.places()["a"][1:] == (0, 1)


def test_given_ranks_are_kept(processes: Processes) -> None:
    processes.come("c", claims(3, fixed=True, rank=2))
    processes.come("a", claims(3, fixed=True, rank=0))
    processes.come("x", claims(5))
    places = processes.places()
    assert {name: place.rank for name, place in places.items()} == {"c": 2, "a": 0, "x": 1}


def leave_a_seat(processes: Processes, claim: Callable[[], RankRequest]) -> None:
    """Take a seat as a process that is then killed."""
    killed = Rendezvous(processes.store(), "killed", claim, time.monotonic, processes.notes.append)
    killed._take_seat(rendezvous._SeatMap(), b"")


@pytest.mark.parametrize("claim", [claims(2), claims(5), claims(7, fixed=True), claims(2, rank=0)])
def test_seat_of_a_dead_process_is_reassigned(processes: Processes, claim: Callable[[], RankRequest]) -> None:
    leave_a_seat(processes, claim)
    processes.come("a", claims(2, fixed=True, rank=0))
    processes.come("b", claims(2, fixed=True, rank=1))
    places = processes.places()
    assert {name: place.rank for name, place in places.items()} == {"a": 0, "b": 1}


def test_world_size_follows_the_view(processes: Processes) -> None:
    worlds = {"a": 3, "b": 3}
    processes.come("a", lambda: RankRequest(worlds["a"], False, None))
    processes.come("b", lambda: RankRequest(worlds["b"], False, None))
    time.sleep(0.5)
    assert not processes.results
    worlds.update(a=2, b=2)
    assert {place.world for place in processes.places().values()} == {2}


def test_contradicting_processes_get_an_error(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CONFIRM_S", 20.0)
    now = [0.0]
    processes.come("a", claims(3, fixed=True, rank=1), 4.0, lambda: now[0])
    give_up = time.monotonic() + 60
    while processes.seats() != ("a",):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    (first,), processes.threads = processes.threads, []
    processes.come("b", claims(3, fixed=True, rank=1))
    processes.come("c", claims(4, fixed=True))
    processes.come("d", claims(3, rank=7))
    results = processes.all()
    assert first.is_alive()
    now[0] = 5.0
    processes.threads.append(first)
    results |= processes.all()
    assert isinstance(results["b"], ConfigError)
    assert "given rank 1" in results["b"].message
    assert isinstance(results["c"], ConfigError)
    assert "a world size of 4, another one of 3" in results["c"].message
    assert isinstance(results["d"], ConfigError)
    assert "rank 7" in results["d"].message
    assert isinstance(results["a"], OperationTimeout)


def test_too_few_processes_time_out_and_free_their_seats(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_FIRST_NOTE_S", 0.5)
    monkeypatch.setattr(rendezvous, "_POLL_S", 0.1)
    looks = count()
    processes.come(
        "a", claims(3), 2.0, lambda: 0.3 * next(looks)
    )  # a fake clock, so a busy machine does not matter
    (result,) = processes.all().values()
    assert isinstance(result, OperationTimeout)
    assert result.message == "1 of 3 processes came to the rendezvous within 2 s"
    assert processes.notes == ["1 of 3 processes are here; waiting for the others"]
    assert processes.seats() == ()
    processes.come("b", claims(2))
    processes.come("c", claims(2))
    assert len(processes.places()) == 2


def test_more_processes_than_seats_form_two_generations(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "CONFIRM_S", 20.0)
    for name in "abcd":
        processes.come(name, claims(2))
    places = processes.places().values()
    generations = {place.generation for place in places}
    assert len(generations) == 2
    assert sorted((place.rank) for place in places) == [0, 0, 1, 1]
