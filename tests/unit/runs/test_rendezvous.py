"""Processes that meet in the lobby: who becomes which rank, whoever died before."""

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
    monkeypatch.setattr(rendezvous, "CALL_S", 1.0)
    with tempfile.TemporaryDirectory(prefix="by-") as directory, KvServers(Path(directory)) as servers:
        yield servers


class Crowd:
    """Processes as threads; each claims what it is told to."""

    def __init__(self, servers: KvServers) -> None:
        self.servers = servers
        self.results: dict[str, RankPlace | BarnraiseError] = {}
        self.threads: list[threading.Thread] = []
        self.words: list[str] = []

    def lobby(self) -> KvClient:
        return KvClient(agent_at(self.servers.directories[0]), Namespace("script.py", LOBBY), 60.0)

    def seats(self) -> tuple[str, ...]:
        return tuple(seat.who for seat in rendezvous._read(self.lobby().get("table") or b"").seats)

    def come(
        self,
        name: str,
        claim: Callable[[], RankRequest],
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        def run() -> None:
            coming = Rendezvous(self.lobby(), name, claim, clock, self.words.append)
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
        found = {}
        for name, result in self.all().items():
            assert isinstance(result, RankPlace), result
            found[name] = result
        return found


@pytest.fixture
def crowd(servers: KvServers) -> Crowd:
    return Crowd(servers)


def claims(world: int, *, fixed: bool = False, rank: int | None = None) -> Callable[[], RankRequest]:
    return lambda: RankRequest(world, fixed, rank)


def test_all_at_once_get_ranks_of_one_generation_and_the_next_start_a_later_one(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "CALL_S", 20.0)
    monkeypatch.setattr(rendezvous, "_KEPT", 4)
    generations = []
    for _ in range(3):
        for name in "abcd":
            crowd.come(name, claims(4))
        places = crowd.places().values()
        assert sorted(place.rank for place in places) == [0, 1, 2, 3]
        assert {place.world for place in places} == {4}
        (generation,) = {place.generation for place in places}
        generations.append(generation)
    assert generations == sorted(set(generations))
    assert crowd.lobby().count() < 20, "the lobby is swept"


def test_one_alone_does_not_wait(crowd: Crowd) -> None:
    crowd.come("a", claims(1))
    assert crowd.places()["a"][1:] == (0, 1)


def test_given_ranks_stay(crowd: Crowd) -> None:
    crowd.come("c", claims(3, fixed=True, rank=2))
    crowd.come("a", claims(3, fixed=True, rank=0))
    crowd.come("x", claims(5))
    places = crowd.places()
    assert {name: place.rank for name, place in places.items()} == {"c": 2, "a": 0, "x": 1}


def leave_a_seat(crowd: Crowd, claim: Callable[[], RankRequest]) -> None:
    """A process that sat down and was killed."""
    killed = Rendezvous(crowd.lobby(), "killed", claim, time.monotonic, crowd.words.append)
    killed._sit_down(rendezvous._SeatMap(), b"")


@pytest.mark.parametrize("claim", [claims(2), claims(5), claims(7, fixed=True), claims(2, rank=0)])
def test_the_seat_of_the_dead_is_given_away(crowd: Crowd, claim: Callable[[], RankRequest]) -> None:
    leave_a_seat(crowd, claim)
    crowd.come("a", claims(2, fixed=True, rank=0))
    crowd.come("b", claims(2, fixed=True, rank=1))
    places = crowd.places()
    assert {name: place.rank for name, place in places.items()} == {"a": 0, "b": 1}


def test_the_world_follows_the_view(crowd: Crowd) -> None:
    worlds = {"a": 3, "b": 3}
    crowd.come("a", lambda: RankRequest(worlds["a"], False, None))
    crowd.come("b", lambda: RankRequest(worlds["b"], False, None))
    time.sleep(0.5)
    assert not crowd.results
    worlds.update(a=2, b=2)
    assert {place.world for place in crowd.places().values()} == {2}


def test_the_living_who_contradict_each_other_are_told(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CALL_S", 20.0)
    now = [0.0]
    crowd.come("a", claims(3, fixed=True, rank=1), 4.0, lambda: now[0])
    give_up = time.monotonic() + 60
    while crowd.seats() != ("a",):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    (first,), crowd.threads = crowd.threads, []
    crowd.come("b", claims(3, fixed=True, rank=1))
    crowd.come("c", claims(4, fixed=True))
    crowd.come("d", claims(3, rank=7))
    results = crowd.all()
    assert first.is_alive()
    now[0] = 5.0
    crowd.threads.append(first)
    results |= crowd.all()
    assert isinstance(results["b"], ConfigError)
    assert "given rank 1" in results["b"].message
    assert isinstance(results["c"], ConfigError)
    assert "a world of 4, another one of 3" in results["c"].message
    assert isinstance(results["d"], ConfigError)
    assert "rank 7" in results["d"].message
    assert isinstance(results["a"], OperationTimeout)


def test_too_few_is_said_and_leaves_no_seat_behind(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_FIRST_WORD_S", 0.5)
    monkeypatch.setattr(rendezvous, "_LOOK_S", 0.1)
    looks = count()
    crowd.come("a", claims(3), 2.0, lambda: 0.3 * next(looks))  # whatever else this machine does
    (result,) = crowd.all().values()
    assert isinstance(result, OperationTimeout)
    assert result.message == "1 of 3 processes came to the rendezvous within 2 s"
    assert crowd.words == ["1 of 3 processes are here; waiting for the others"]
    assert crowd.seats() == ()
    crowd.come("b", claims(2))
    crowd.come("c", claims(2))
    assert len(crowd.places()) == 2


def test_more_than_fit_form_two_generations(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CALL_S", 20.0)
    for name in "abcd":
        crowd.come(name, claims(2))
    places = crowd.places().values()
    generations = {place.generation for place in places}
    assert len(generations) == 2
    assert sorted((place.rank) for place in places) == [0, 0, 1, 1]
