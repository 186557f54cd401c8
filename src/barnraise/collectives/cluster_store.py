"""torch's store and rendezvous on the cluster's replicated store: no address, port or master process.

All agents together keep the keys of a group, in the scope of its run and generation. The keys survive the
loss of any machine, and keys of an earlier start of the script are never visible.
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

_MAX_NAME = 200
_POLL_S = 0.3

# torch holds only the C++ part of a store, which needs the Python part.
_alive: list[ClusterStore] = []
_rendezvous_numbers = count(1)


class ClusterStore(Store):
    """torch store over one scope of the replicated store.

    Thread-safe; raises the errors of torch's stores.
    """

    def __init__(self, kv: KvClient, timeout: timedelta | None = None) -> None:
        super().__init__()
        self._kv = kv
        if timeout is not None:
            self.set_timeout(timeout)
        _alive.append(self)

    def close(self) -> None:
        """Close the client when no group needs the store."""
        self._kv.close()
        if self in _alive:
            _alive.remove(self)

    @property
    def scope(self) -> Namespace:
        return self._kv.scope

    def set(self, key: str, value: str | bytes) -> None:
        with _torch_errors():
            self._kv.set(key, _bytes(value), self._timeout_s())

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        with _torch_errors():
            return self._kv.add(key, value, self._timeout_s())

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        with _torch_errors():
            expected, desired = _bytes(expected_value), _bytes(desired_value)
            return self._kv.compare_set(key, expected, desired, self._timeout_s())

    def append(self, key: str, value: str | bytes) -> None:
        with _torch_errors():
            self._kv.append(key, _bytes(value), self._timeout_s())

    def check(self, keys: Sequence[str]) -> bool:
        with _torch_errors():
            return not self._kv.missing(list(keys), self._timeout_s())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with _torch_errors():
            self._kv.wait(list(keys), self._timeout_s(timeout))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with _torch_errors():
            return self._kv.multi_get(list(keys), self._timeout_s())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        with _torch_errors():
            self._kv.multi_set(list(keys), [_bytes(value) for value in values], self._timeout_s())

    def delete_key(self, key: str) -> bool:
        with _torch_errors():
            return self._kv.delete(key, self._timeout_s())

    def num_keys(self) -> int:
        with _torch_errors():
            return self._kv.count(self._timeout_s())

    # torch's C++ calls these two by other names than its Python.

    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    def queue_push(self, key: str, value: str | bytes) -> None:
        with _torch_errors():
            self._kv.push(key, _bytes(value), self._timeout_s())

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        deadline = time.monotonic() + self._timeout_s()
        with _torch_errors():
            while (value := self._kv.pop(key, self._timeout_s())) is None:
                if not block:
                    raise dist.QueueEmptyError(f"the queue {key!r} is empty")
                self._kv.wait([key], max(0.0, deadline - time.monotonic()))
            return value

    def queue_len(self, key: str) -> int:
        with _torch_errors():
            return self._kv.length(key, self._timeout_s())

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> ClusterStore:
        """Return the store itself, which several threads may use at once."""
        return self

    def _timeout_s(self, timeout: timedelta | None = None) -> float:
        chosen: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # the stub lacks it
        return chosen.total_seconds()


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Convert our errors to DistStoreError, a RuntimeError that torch's own code catches."""
    try:
        yield
    except BarnraiseError as error:
        raise dist.DistStoreError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


# rendezvous


class _Given(NamedTuple):
    """Values that the caller, the environment or a launcher has set."""

    run: str
    rank: int | None
    world: int | None
    generation: int | None


def cluster_rendezvous(
    url: str, timeout: timedelta = default_pg_timeout, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Serve the URL ``barnraise://RUN?generation=G`` as init_method. Name and query are optional."""
    connect = agent_at(state_directory(load_settings()))
    yield _join(connect, ask_cluster(connect), _given(url), timeout)
    raise RuntimeError("a rendezvous cannot be repeated")


def meet_or_fall_back(
    original: Handler, url: str, timeout: timedelta = default_pg_timeout, **rest: Any
) -> Iterator[tuple[Store, int, int]]:
    """Serve ``env://`` without an address: in the cluster if an agent answers, otherwise as torch does."""
    try:
        connect = agent_at(state_directory(load_settings()))
        status = ask_cluster(connect)
    except BarnraiseError as error:
        log.debug("no cluster for the rendezvous: %s", error)
        return original(url, timeout=timeout, **rest)
    return iter([_join(connect, status, _given(url), timeout)])


def launched_rendezvous(
    url: str, timeout: timedelta = default_pg_timeout, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Serve a process whose rank the launcher has set. Only the store is ours."""
    given = _given(url)
    place = _launched_place(given)
    # A script that creates its default group again must not find the keys of the previous one. All ranks do
    # it equally often.
    store = PrefixStore(f"meeting/{next(_rendezvous_numbers)}", launched_store(timeout))
    yield store, place.rank, place.world
    raise RuntimeError("a rendezvous cannot be repeated")


def launched_store(timeout: timedelta | None = None) -> Store:
    """Return the store of this process's run and generation.

    If all ranks are on one machine, the store is a file: it starts faster and needs no quorum.
    """
    timeout = default_pg_timeout if timeout is None else timeout
    file = os.environ.get("BARNRAISE_LOCAL_STORE")
    if file and len(set(os.environ.get("BARNRAISE_MACHINES", "").split(","))) == 1:
        store = FileStore(file, int(os.environ.get("WORLD_SIZE", "1")))
        store.set_timeout(timeout)
        return store
    return ClusterStore(launched_kv_client(timeout.total_seconds()), timeout)


def launched_kv_client(timeout_s: float) -> KvClient:
    given = _given("env://")
    connect = agent_at(state_directory(load_settings()))
    return KvClient(connect, Namespace(given.run, given.generation or 0), timeout_s)


def _launched_place(given: _Given) -> RankPlace:
    if given.rank is None or given.world is None:
        raise ConfigError(
            "RANK or WORLD_SIZE of this process is not set",
            hint="Let `barnraise run` start it, or set RANK and WORLD_SIZE.",
        )
    return RankPlace(given.generation or 0, given.rank, given.world)


def _join(
    connect: Connect, status: ClusterResponse, given: _Given, timeout: timedelta
) -> tuple[ClusterStore, int, int]:
    place = _place(connect, status, given, timeout.total_seconds())
    log.info("run %r, generation %d: rank %d of %d", given.run, *place)
    kv = KvClient(connect, Namespace(given.run, place.generation), timeout.total_seconds())
    return ClusterStore(kv, timeout), place.rank, place.world


def _place(connect: Connect, status: ClusterResponse, given: _Given, timeout_s: float) -> RankPlace:
    if None not in (given.rank, given.world, given.generation):
        return RankPlace(given.generation or 0, given.rank or 0, given.world or 1)
    deadline = time.monotonic() + timeout_s
    while given.world is None and status.world == 0:
        if time.monotonic() > deadline:
            raise MembershipError(f"this machine was not in the cluster for {timeout_s:g} s")
        time.sleep(_POLL_S)
        status = ask_cluster(connect)
    last = status.world

    def claim() -> RankRequest:
        nonlocal last
        if given.world is not None:
            return RankRequest(given.world, True, given.rank)
        try:
            last = ask_cluster(connect).world or last
        except (AgentError, ListenerError) as error:
            log.debug("the agent did not report the world size: %s", error)
        return RankRequest(last, False, given.rank)

    def warn(text: str) -> None:
        log.warning("run %r: %s", given.run, text)

    lobby = KvClient(connect, Namespace(given.run, LOBBY), timeout_s)
    try:
        arrival = Rendezvous(lobby, secrets.token_hex(8), claim, time.monotonic, warn)
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
                        f"{place} is {text!r}, which is not a number", hint="Set it to a whole number."
                    ) from None
                if value >= 0:
                    return value
        return None

    return _Given(
        run[:_MAX_NAME],
        number("rank", "RANK"),
        number("world_size", "WORLD_SIZE", "BARNRAISE_WORLD"),
        number("generation", "BARNRAISE_GENERATION"),
    )
