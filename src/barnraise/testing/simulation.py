"""Simulation of a group: one thread for each rank, the real algorithms, and no sockets."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from barnraise.collectives.c10d.create import arena_of_thread
from barnraise.collectives.shm.arena import SharedArena
from barnraise.collectives.torch_patch.autoload import register
from barnraise.core.config import load_settings
from barnraise.core.errors import CollectiveError, ConfigError, OperationTimeout
from barnraise.testing.faults import Faults, check_faults
from barnraise.testing.network import SimulatedNetwork
from barnraise.testing.rank_channel import RankChannel
from barnraise.testing.thread_world import own_world, separate_worlds

_MARGIN_S = 2.0  # an operation that times out says more than the simulation can
_AFTER_FAILURE_S = 2.0
_JOIN_S = 2.0

Result = TypeVar("Result")


class RankAbandoned(SystemExit):
    """End of a rank that runs on after the simulation. A thread ends silently with a SystemExit."""


def spawn(
    body: Callable[[int], Result],
    *,
    world: int,
    timeout_s: float = 30.0,
    delay_s: float = 0.0,
    delays: Mapping[tuple[int, int], float] | None = None,
    kills: Mapping[int, int] | None = None,
) -> dict[int, Result]:
    """Call ``body(rank)`` for each rank, in a thread of its own, and return the results by rank.

    Each rank has ``torch.distributed`` to itself. Its default group has ``world`` ranks, the backend
    ``barnraise`` and real operations. ``timeout_s``: limit of every operation, and of the time in which no
    rank does one. ``delay_s``: time that each message is on its way. ``delays[0, 1]``: the same from rank 0
    to rank 1. ``kills={2: 3}``: rank 2 dies before its third operation, and has no result.

    Raise the first error that a rank raises, with a note that names the rank. Raise OperationTimeout if a
    rank does not end. docs/testing.md says what a simulation leaves out.
    """
    faults = Faults(delay_s, dict(delays or {}), dict(kills or {}))
    check_faults(faults, world)
    if not 0 < timeout_s < threading.TIMEOUT_MAX:
        raise ConfigError(f"timeout_s is {timeout_s}, which is no limit", hint="Give seconds above 0.")
    register()  # the backend; a process may import torch without it
    with separate_worlds():
        return _Simulation(body, world, timeout_s, faults).run()


class _Simulation(Generic[Result]):
    """One call of `spawn`: its ranks, and what became of each."""

    def __init__(self, body: Callable[[int], Result], world: int, timeout_s: float, faults: Faults) -> None:
        self._body = body
        self._world = world
        self._timeout_s = timeout_s
        self._kills = faults.kills
        self._network = SimulatedNetwork(faults.delay_between)
        settings = load_settings()
        self._channels = [
            RankChannel(self._network, rank, settings, timeout_s, faults.kills.get(rank))
            for rank in range(world)
        ]
        self._threads = [
            threading.Thread(target=self._run_rank, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(world)
        ]
        self._store = HashStore()
        self._changed = threading.Condition()
        self._running = set(range(world))
        self._results: dict[int, Result] = {}
        self._errors: dict[int, BaseException] = {}  # in the order of time
        self._failed_at: float | None = None
        self._is_over = False

    def run(self) -> dict[int, Result]:
        """Run all ranks to their end. Return the results by rank, or raise the first error."""
        self._network.start()
        try:
            for thread in self._threads:
                thread.start()
            self._wait()
        finally:
            stuck = self._stop()
        self._raise_error(stuck)
        return {rank: self._results[rank] for rank in sorted(self._results)}

    # on the thread of a rank

    def _run_rank(self, rank: int) -> None:
        result: dict[int, Result] = {}
        error: BaseException | None = None
        with self._as_rank(rank):
            try:
                dist.init_process_group(
                    "barnraise",
                    store=self._store,
                    rank=rank,
                    world_size=self._world,
                    timeout=timedelta(seconds=self._timeout_s),
                )
                result[rank] = self._body(rank)
            except BaseException as raised:  # noqa: BLE001  # the test gets it
                error = raised
            self._end_rank(rank, result, error)

    @contextmanager
    def _as_rank(self, rank: int) -> Iterator[None]:
        token = arena_of_thread.set(SharedArena(self._channels[rank]))
        try:
            # Gradients must be computed on this thread: others are no rank.
            with own_world(), torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            arena_of_thread.reset(token)

    def _end_rank(self, rank: int, result: dict[int, Result], error: BaseException | None) -> None:
        """Note how a rank ended, and end its part in all groups as the end of a process would."""
        channel = self._channels[rank]
        with self._changed:
            if self._is_over:
                return  # torch is as before the simulation, so nothing may be changed in it
            if not channel.is_killed:  # torch may have made another error of a kill
                self._results.update(result)
            if error is not None and not channel.is_killed:
                self._errors[rank] = error
                self._failed_at = self._failed_at or time.monotonic()
            channel.leave()
            self._running.discard(rank)
            self._changed.notify_all()
            if dist.is_initialized():
                dist.destroy_process_group()

    # on the thread of the test

    def _wait(self) -> None:
        """Wait until all ranks have ended, or those that run cannot be waited for."""
        with self._changed:
            while self._running:
                left_s = self._deadline() - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    def _deadline(self) -> float:
        if self._failed_at is not None:
            return self._failed_at + _AFTER_FAILURE_S
        return max(channel.active_at for channel in self._channels) + self._timeout_s + _MARGIN_S

    def _stop(self) -> dict[int, str]:
        """End the network and all threads. Return the ranks that had not ended, and where they were."""
        with self._changed:
            self._is_over = True
            stuck = {rank: self._place_of(rank) for rank in sorted(self._running)}
            for rank in stuck:
                _interrupt(self._threads[rank])
        for channel in self._channels:
            channel.abandon()
        self._network.close()
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread.ident is not None:  # the system may refuse to start a thread
                thread.join(max(0.0, until - time.monotonic()))
        return stuck

    def _place_of(self, rank: int) -> str:
        """Return the line at which a rank is: in the file of the body, if it is on the stack."""
        frame = sys._current_frames().get(self._threads[rank].ident or 0)
        if frame is None:
            return "about to end"
        calls = traceback.extract_stack(frame)
        file = getattr(getattr(self._body, "__code__", None), "co_filename", None)
        call = next((call for call in reversed(calls) if call.filename == file), calls[-1])
        return f"{call.filename}:{call.lineno} in {call.name}"

    def _raise_error(self, stuck: Mapping[int, str]) -> None:
        places = [f"rank {rank} did not end: {place}" for rank, place in stuck.items()]
        if self._errors:
            (rank, error), *others = self._errors.items()
            error.add_note(f"raised by rank {rank} of {self._world}")
            for other, later in others:
                sentence = str(later).partition("\n")[0]
                error.add_note(f"rank {other}: {type(later).__name__}: {sentence}")
            for place in places:
                error.add_note(place)
            raise error
        if places:
            raise OperationTimeout(
                f"for {self._timeout_s:g} s no rank called an operation or ended; {'; '.join(places)}",
                late=tuple(stuck),
                hint="See what these lines wait for, or give spawn a longer timeout_s.",
            )
        for rank, before in self._kills.items():
            if not self._channels[rank].is_killed:
                raise CollectiveError(
                    f"rank {rank} was to die before its operation {before}, but ended after "
                    f"{self._channels[rank].operations}",
                    hint="Name an earlier operation in kills.",
                )


def _interrupt(thread: threading.Thread) -> None:
    """Raise RankAbandoned in a thread, at its next line of Python."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(RankAbandoned)
        )
