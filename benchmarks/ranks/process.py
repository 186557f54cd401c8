"""Fork server on a host, and the loop in which a forked rank executes commands.

Run by ``benchmarks.ranks.hosts`` as ``python -m benchmarks.ranks.process``, with arguments ``<driver socket>
<host index> <log file> <address>``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel  # noqa: F401  (imported once, before the forks)

from benchmarks.ranks import faults, measure
from tests.json_socket import JsonSocket

PR_SET_PDEATHSIG = 1
GROUP_SECONDS = 60.0
Command = Callable[..., Any]


class Worker:
    """State of a rank between commands: a store and named groups."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self.groups: dict[str, Any] = {}
        self._served: Store | None = None
        self._registered = False

    def serve_store(self, address: str) -> int:
        """Serve the store of the run from a process of its own, so that any rank may be killed."""
        served = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._served = served
        return int(served.port)

    def connect_store(self, address: str, port: int) -> None:
        self.store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))

    def join(self, backend: str, prefix: str, rank: int, world: int, timeout: float = 60.0) -> float:
        """Create the default group and return the seconds that took."""
        if self.store is None:
            raise RuntimeError("no store yet")
        self._prepare(backend)
        start = time.monotonic()
        dist.init_process_group(
            backend,
            store=PrefixStore(prefix, self.store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        return time.monotonic() - start

    def leave(self) -> float:
        start = time.monotonic()
        self.groups.clear()
        dist.destroy_process_group()
        gc.collect()
        return time.monotonic() - start

    def group(self, name: str, backend: str, members: list[int], settings: Mapping[str, str]) -> float:
        """Create a named group of some ranks with some settings in the environment; all ranks call it."""
        self._prepare(backend)
        before = {key: os.environ.get(key) for key in settings}
        os.environ.update(settings)
        start = time.monotonic()
        try:
            made = dist.new_group(members, backend=backend, timeout=timedelta(seconds=GROUP_SECONDS))
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
        if dist.get_rank() in members:
            self.groups[name] = made
        return time.monotonic() - start

    def _prepare(self, backend: str) -> None:
        if backend == "barnraise" and not self._registered:
            from barnraise.collectives.torch_patch import autoload

            autoload.register()
            self._registered = True


def commands(worker: Worker) -> dict[str, Command]:
    return {
        "serve_store": worker.serve_store,
        "connect_store": worker.connect_store,
        "join": worker.join,
        "leave": worker.leave,
        "group": worker.group,
        "all_reduce": lambda **rest: measure.all_reduce(worker.groups, **rest),
        "latency": lambda **rest: measure.latency(worker.groups, **rest),
        "issued": lambda **rest: measure.issued(worker.groups, **rest),
        "train": lambda **rest: measure.train(worker.groups, **rest),
        "collectives_until_error": faults.collectives_until_error,
        "all_reduces": faults.all_reduces,
        "checked_all_reduce": faults.checked_all_reduce,
        "rebuild": lambda **rest: faults.rebuild(worker, **rest),
        "comm_process_pids": measure.comm_process_pids,
    }


def serve(connection: JsonSocket) -> None:
    """Execute commands and send answers until the driver closes the connection."""
    known = commands(Worker())
    while True:
        message = connection.receive(None)
        if message is None:
            return
        try:
            connection.send({"ok": known[message.pop("do")](**message)})
        except Exception:  # noqa: BLE001 - the driver is told, and decides
            connection.send({"error": traceback.format_exc()})


def _connect(path: str, hello: Mapping[str, Any]) -> JsonSocket:
    connection = JsonSocket.dial(path)
    connection.send(hello)
    return connection


def _rank(path: str, request: Mapping[str, Any]) -> None:
    """Run the forked child; never returns."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(request["environment"])
        serve(_connect(path, {"label": request["label"], "pid": os.getpid()}))
    except BaseException:  # noqa: BLE001 - a forked child must never return into the fork server
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _interface(address: str) -> str:
    """Return the name of the interface that has this address, as Gloo requires it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(candidate.address == address for candidate in addresses):
            return str(name)
    raise RuntimeError(f"no interface here has the address {address}")


def main(path: str, host: int, log: str, address: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ["GLOO_SOCKET_IFNAME"] = _interface(address)
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed ranks leave no zombies
    with suppress(ImportError):  # what all ranks need, once; runs of Gloo alone do without
        import barnraise.collectives.c10d.create  # noqa: F401
    connection = _connect(path, {"fork_server": host})
    gc.freeze()
    while (request := connection.receive(None)) is not None:
        if os.fork() == 0:
            connection.close()
            _rank(path, request)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
