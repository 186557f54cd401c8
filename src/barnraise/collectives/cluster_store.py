"""torch's store and rendezvous, served by the cluster itself: no address, no port, no process that must live.

The keys of a group are kept by all agents together, in the scope of its run and generation. So they outlive
any machine, and what an earlier start of the script left behind is never seen.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.constants import default_pg_timeout

from barnraise.agent_client.kv_client import Connect, KvClient, agent_at, ask_cluster
from barnraise.agent_client.kv_messages import LOBBY, ClusterResponse, Namespace
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import AgentError, BarnraiseError, ConfigError, ListenerError, MembershipError
from barnraise.runs.rendezvous import RankPlace, RankRequest, Rendezvous

log = logging.getLogger("barnraise.collectives")

Handler = Callable[..., Iterator[tuple[Store, int, int]]]

_LONGEST_NAME = 200
_POLL_S = 0.3

# torch holds only the C++ part of a store, which is of no use without the Python part.
_alive: list[ClusterStore] = []
_meetings = count(1)


class ClusterStore(Store):
    """A store over one scope of the board; any thread may use it. Errors are what torch's stores raise."""

    def __init__(self, board: KvClient, timeout: timedelta | None = None) -> None:
        super().__init__()
        self._board = board
        if timeout is not None:
            self.set_timeout(timeout)
        _alive.append(self)

    def close(self) -> None:
        """No group needs it any more."""
        self._board.close()
        if self in _alive:
            _alive.remove(self)

    @property
    def scope(self) -> Namespace:
        return self._board.scope

    def set(self, key: str, value: str | bytes) -> None:
        with _as_torch_says_it():
            self._board.set(key, _bytes(value), self._patience())

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        with _as_torch_says_it():
            return self._board.add(key, value, self._patience())

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        with _as_torch_says_it():
            expected, desired = _bytes(expected_value), _bytes(desired_value)
            return self._board.compare_set(key, expected, desired, self._patience())

    def append(self, key: str, value: str | bytes) -> None:
        with _as_torch_says_it():
            self._board.append(key, _bytes(value), self._patience())

    def check(self, keys: Sequence[str]) -> bool:
        with _as_torch_says_it():
            return not self._board.missing(list(keys), self._patience())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with _as_torch_says_it():
            self._board.wait(list(keys), self._patience(timeout))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with _as_torch_says_it():
            return self._board.multi_get(list(keys), self._patience())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        with _as_torch_says_it():
            self._board.multi_set(list(keys), [_bytes(value) for value in values], self._patience())

    def delete_key(self, key: str) -> bool:
        with _as_torch_says_it():
            return self._board.delete(key, self._patience())

    def num_keys(self) -> int:
        with _as_torch_says_it():
            return self._board.count(self._patience())

    # torch's C++ asks for these two under other names than its Python does.

    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    def queue_push(self, key: str, value: str | bytes) -> None:
        with _as_torch_says_it():
            self._board.push(key, _bytes(value), self._patience())

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        deadline = time.monotonic() + self._patience()
        with _as_torch_says_it():
            while (value := self._board.pop(key, self._patience())) is None:
                if not block:
                    raise dist.QueueEmptyError(f"the queue {key!r} is empty")
                self._board.wait([key], max(0.0, deadline - time.monotonic()))
            return value

    def queue_len(self, key: str) -> int:
        with _as_torch_says_it():
            return self._board.length(key, self._patience())

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> ClusterStore:
        """Itself: it may be used from several threads at once."""
        return self

    def _patience(self, timeout: timedelta | None = None) -> float:
        chosen: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # the stub lacks it
        return chosen.total_seconds()


@contextmanager
def _as_torch_says_it() -> Iterator[None]:
    """torch's own code catches RuntimeError from a store, and DistStoreError is one."""
    try:
        yield
    except BarnraiseError as error:
        raise dist.DistStoreError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


# rendezvous


class _Given(NamedTuple):
    """What the caller, the environment or a launcher has fixed already."""

    run: str
    rank: int | None
    world: int | None
    generation: int | None


def cluster_rendezvous(
    url: str, timeout: timedelta = default_pg_timeout, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """For ``init_method="barnraise://RUN?generation=G"``; the name and what follows it may be left out."""
    connect = agent_at(state_directory(load_settings()))
    yield _meet(connect, ask_cluster(connect), _given(url), timeout)
    raise RuntimeError("a group that has met cannot meet again")


def meet_or_fall_back(
    original: Handler, url: str, timeout: timedelta = default_pg_timeout, **rest: Any
) -> Iterator[tuple[Store, int, int]]:
    """For ``env://`` without an address: in the cluster if an agent answers here, otherwise as torch does."""
    try:
        connect = agent_at(state_directory(load_settings()))
        told = ask_cluster(connect)
    except BarnraiseError as error:
        log.debug("no cluster to meet in: %s", error)
        return original(url, timeout=timeout, **rest)
    return iter([_meet(connect, told, _given(url), timeout)])


def launched_rendezvous(
    url: str, timeout: timedelta = default_pg_timeout, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """For a process that a launcher gave its place: nobody is asked, only the store is ours."""
    given = _given(url)
    place = _launched_place(given)
    # A script that makes its default group again must not find the keys of the one before. All ranks do it
    # equally often, or it would not work under any launcher.
    store = PrefixStore(f"meeting/{next(_meetings)}", launched_store(timeout))
    yield store, place.rank, place.world
    raise RuntimeError("a group that has met cannot meet again")


def launched_store(timeout: timedelta | None = None) -> Store:
    """The store of this process's run and generation.

    Where all ranks are on one machine a file does it: they start faster, and need no quorum of the cluster.
    """
    patience = default_pg_timeout if timeout is None else timeout
    file = os.environ.get("BARNRAISE_LOCAL_STORE")
    if file and len(set(os.environ.get("BARNRAISE_MACHINES", "").split(","))) == 1:
        store = FileStore(file, int(os.environ.get("WORLD_SIZE", "1")))
        store.set_timeout(patience)
        return store
    return ClusterStore(launched_board(patience.total_seconds()), patience)


def launched_board(timeout_s: float) -> KvClient:
    given = _given("env://")
    connect = agent_at(state_directory(load_settings()))
    return KvClient(connect, Namespace(given.run, given.generation or 0), timeout_s)


def _launched_place(given: _Given) -> RankPlace:
    if given.rank is None or given.world is None:
        raise ConfigError(
            "this process has no rank or no world size",
            hint="Let `barnraise run` start it, or set RANK and WORLD_SIZE.",
        )
    return RankPlace(given.generation or 0, given.rank, given.world)


def _meet(
    connect: Connect, told: ClusterResponse, given: _Given, timeout: timedelta
) -> tuple[ClusterStore, int, int]:
    place = _place(connect, told, given, timeout.total_seconds())
    log.info("run %r, generation %d: rank %d of %d", given.run, *place)
    board = KvClient(connect, Namespace(given.run, place.generation), timeout.total_seconds())
    return ClusterStore(board, timeout), place.rank, place.world


def _place(connect: Connect, told: ClusterResponse, given: _Given, timeout_s: float) -> RankPlace:
    if None not in (given.rank, given.world, given.generation):
        return RankPlace(given.generation or 0, given.rank or 0, given.world or 1)
    deadline = time.monotonic() + timeout_s
    while given.world is None and told.world == 0:
        if time.monotonic() > deadline:
            raise MembershipError(f"this machine was in no view of the cluster for {timeout_s:g} s")
        time.sleep(_POLL_S)
        told = ask_cluster(connect)
    last = told.world

    def claim() -> RankRequest:
        nonlocal last
        if given.world is not None:
            return RankRequest(given.world, True, given.rank)
        try:
            last = ask_cluster(connect).world or last
        except (AgentError, ListenerError) as error:
            log.debug("the agent did not say how many we are: %s", error)
        return RankRequest(last, False, given.rank)

    def say(text: str) -> None:
        log.warning("run %r: %s", given.run, text)

    lobby = KvClient(connect, Namespace(given.run, LOBBY), timeout_s)
    try:
        arrival = Rendezvous(lobby, secrets.token_hex(8), claim, time.monotonic, say)
        return arrival.arrive(max(0.0, deadline - time.monotonic()))
    finally:
        lobby.close()


def _given(url: str) -> _Given:
    parts = urlparse(url)
    query = dict(parse_qsl(parts.query))
    name = unquote(parts.netloc) if parts.scheme == "barnraise" else ""
    script = Path(sys.argv[0]).name if sys.argv else ""
    run = name or os.environ.get("BARNRAISE_RUN") or script or "interactive"

    def number(key: str, *variables: str) -> int | None:
        for place, text in ((key, query.get(key)), *((name, os.environ.get(name)) for name in variables)):
            if text:
                try:
                    value = int(text)
                except ValueError:
                    raise ConfigError(
                        f"{place} is {text!r}, which is no number", hint="Correct it."
                    ) from None
                if value >= 0:
                    return value
        return None

    return _Given(
        run[:_LONGEST_NAME],
        number("rank", "RANK"),
        number("world_size", "WORLD_SIZE", "BARNRAISE_WORLD"),
        number("generation", "BARNRAISE_GENERATION"),
    )
