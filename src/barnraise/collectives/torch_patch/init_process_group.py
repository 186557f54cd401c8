"""Wraps torch.distributed functions, so that scripts started by ``barnraise run`` need no change.

Ranks meet in the cluster and ignore the address that the script names. Each group gets the backend that
``runs.backend_choice`` selects. Only public functions of torch that create groups and stores are wrapped,
in every module that exports them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from barnraise.collectives.rendezvous import read_values, wait_for_ranks
from barnraise.collectives.torch_patch.torch_rpc import refuse_rpc_in_plaintext
from barnraise.core.config import load_settings
from barnraise.core.errors import ConfigError
from barnraise.core.flow.log_once import first_time
from barnraise.runs.backend_choice import (
    OURS,
    BackendChoice,
    RankDevices,
    choose_group_backend,
    decode_rank,
    default_backend,
    describe_choice,
    encode_rank,
)

log = logging.getLogger("barnraise.collectives")

_MODULES = (
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed.device_mesh",
    "torch.distributed.rendezvous",
)

# MASTER_ADDR of launched processes. The launcher repeats it (a test compares them), because importing its
# module would slow down `import torch`.
NO_HOST = "barnraise.invalid"

Function = Callable[..., Any]


class LaunchEnvironment(NamedTuple):
    """Values that the launcher set: the run, the machine of every rank, and this rank's device."""

    run: str
    rank: int
    machines: tuple[int, ...]
    device: str
    forced: str
    fabric: str

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LaunchEnvironment:
        try:
            rank = int(environment["RANK"])
            machines = tuple(int(text) for text in environment["BARNRAISE_MACHINES"].split(","))
            if not 0 <= rank < len(machines):
                raise ValueError(f"there is no rank {rank} among {len(machines)}")
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"RANK or BARNRAISE_MACHINES of this process is missing or invalid: {error}",
                hint="Let `barnraise run` start it, or unset BARNRAISE_LAUNCHED.",
            ) from None
        return cls(
            environment.get("BARNRAISE_RUN", ""),
            rank,
            machines,
            environment.get("BARNRAISE_DEVICE", "cpu"),
            environment.get("BARNRAISE_ENGINE", "auto"),
            environment.get("BARNRAISE_FABRIC", "untrusted"),
        )


class WorldSpec(NamedTuple):
    """The default group: the devices and machines of its ranks, and its backend."""

    launch: LaunchEnvironment
    ranks: tuple[RankDevices, ...]
    machines: tuple[int, ...]
    backend: str


_installed = False
_world: WorldSpec | None = None
_exchanges = count(1)


def install() -> None:
    """Wrap torch's functions once."""
    global _installed
    if _installed or not _is_launched():
        return
    _installed = True
    refuse_rpc_in_plaintext(os.environ)
    _replace("init_process_group", _wrapped(dist.init_process_group, _init_process_group))
    _replace("new_group", _wrapped(dist.new_group, _new_group))
    _replace("split_group", _wrapped(dist.split_group, _split_group))
    _replace("TCPStore", LaunchedTcpStore)
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers["env"] = _rendezvous_handler(handlers["env"], lambda url: True)
    handlers["tcp"] = _rendezvous_handler(handlers["tcp"], lambda url: urlparse(url).hostname == NO_HOST)
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if several and os.environ.get("BARNRAISE_DEVICE") in ("cpu", "mps"):
        # Without this Accelerate would silently train each process alone.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _is_launched() -> bool:
    """Return True in a rank of the run, but not in processes that a rank starts by multiprocessing."""
    return bool(os.environ.get("BARNRAISE_LAUNCHED")) and multiprocessing.parent_process() is None


def _replace(name: str, ours: object) -> None:
    theirs = getattr(dist, name)
    for module in map(import_module, _MODULES):
        if getattr(module, name, None) is theirs:
            setattr(module, name, ours)


def _wrapped(original: Function, inner: Callable[[Function, inspect.BoundArguments], Any]) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # torch raises its own error
            return original(*args, **kwargs)
        return inner(original, bound) if _is_launched() else original(*args, **kwargs)

    return call


# groups


def _init_process_group(original: Function, bound: inspect.BoundArguments) -> None:
    global _world
    arguments = bound.arguments
    if dist.is_initialized():
        _call_original(original, bound)  # torch reports the second call
        return
    launch = LaunchEnvironment.read(os.environ)
    own = RankDevices(_text(arguments.get("backend")), launch.device, _nccl_available(), sys.platform)
    size = arguments.get("world_size", -1)
    if arguments.get("rank", -1) in (-1, launch.rank) and size in (-1, len(launch.machines)):
        ranks, machines = (
            _exchange_devices(launch, own, arguments.get("timeout") or _configured_timeout()),
            launch.machines,
        )
    else:  # the script sets its own ranks, so their machines are unknown
        ranks = (own,) * max(size, 1)
        apart = len(set(launch.machines)) > 1
        machines = tuple(range(len(ranks))) if apart else (0,) * len(ranks)
    choice = choose_group_backend(ranks, machines, launch.forced, launch.fabric)
    from barnraise.collectives.torch_patch.run_levels import check_run_levels  # slow to import

    check_run_levels(choice.backend, len(ranks))
    _print_choice(own.requested, choice, machines, launch.rank)
    if choice.backend != default_backend(own.requested, launch.device):
        _set_backend(arguments, choice, own.requested)
    _call_original(original, bound)
    _world = WorldSpec(launch, ranks, machines, choice.backend)


def _new_group(original: Function, bound: inspect.BoundArguments) -> Any:
    arguments, world = bound.arguments, _world
    members = arguments.get("ranks")
    numbers = range(len(world.ranks) if world else 0) if members is None else sorted(members)
    if world is None or not numbers or not 0 <= numbers[0] <= numbers[-1] < len(world.ranks):
        return _call_original(original, bound)  # torch reports the error
    requested = _text(arguments.get("backend"))
    ranks = [world.ranks[number] for number in numbers]
    if requested is not None:
        ranks = [RankDevices(requested, rank.device, rank.nccl_available, rank.system) for rank in ranks]
    machines = [world.machines[number] for number in numbers]
    choice = choose_group_backend(ranks, machines, world.launch.forced, world.launch.fabric)
    _print_choice(requested or ranks[0].requested, choice, machines, world.launch.rank)
    # Without a name torch uses the backend of the default group.
    if choice.backend != (world.backend if requested is None else requested):
        _set_backend(arguments, choice, requested)
    elif choice.backend == OURS:
        _remove_options(arguments, "the barnraise backend does not use it")
    return _call_original(original, bound)


def _split_group(original: Function, bound: inspect.BoundArguments) -> Any:
    """Replace ``split_group``, which torch has for NCCL only, by new groups."""
    arguments = bound.arguments
    parent, splits = arguments.get("parent_pg") or dist.group.WORLD, arguments.get("split_ranks")
    if not splits or parent is None or dist.get_backend(parent) != OURS:
        return _call_original(original, bound)
    numbers = dist.get_process_group_ranks(parent)
    format_label = {
        name: arguments[name] for name in ("timeout", "group_desc") if arguments.get(name) is not None
    }
    own_group = None
    for split in splits:
        members = sorted(numbers[place] for place in split)
        is_member = dist.get_rank() in members
        # All ranks may create each group together only if all of them call this.
        if parent is dist.group.WORLD:
            group = dist.new_group(members, **format_label)
        elif is_member:
            group = dist.new_group(members, use_local_synchronization=True, **format_label)
        if is_member:
            own_group = group
    return own_group


def _exchange_devices(
    launch: LaunchEnvironment, own: RankDevices, timeout: timedelta
) -> tuple[RankDevices, ...]:
    """Exchange the devices of all ranks, so that all ranks choose the same backend."""
    from barnraise.collectives.cluster_store import launched_store

    if len(launch.machines) == 1:
        return (own,)
    store = launched_store(timeout)
    meeting = next(_exchanges)
    keys = [f"engine/{meeting}/rank {number}" for number in range(len(launch.machines))]
    store.set(keys[launch.rank], encode_rank(own))  # type: ignore[arg-type]  # bytes are taken too
    hint = f"`barnraise logs {launch.run}` shows what each worker printed."
    wait_for_ranks(store, keys, timeout.total_seconds(), hint)
    devices = [decode_rank(data, number) for number, data in enumerate(read_values(store, keys))]
    devices[launch.rank] = own
    return tuple(devices)


def _configured_timeout() -> timedelta:
    return timedelta(seconds=load_settings().collectives.timeout_s)


def _nccl_available() -> bool:
    return dist.is_nccl_available() and torch.cuda.is_available()


def _text(backend: str | None) -> str | None:
    return str(backend).lower() if backend else None


def _set_backend(arguments: dict[str, Any], choice: BackendChoice, requested: str | None) -> None:
    arguments["backend"] = choice.backend
    _remove_options(
        arguments, f"the group uses {choice.backend} instead of {requested or 'the default of torch'}"
    )


def _remove_options(arguments: dict[str, Any], why: str) -> None:
    for name in ("pg_options", "device_id"):
        if arguments.get(name) is not None:
            log.info("%s is ignored: %s", name, why)
            arguments[name] = None


def _print_choice(requested: str | None, choice: BackendChoice, machines: Sequence[int], rank: int) -> None:
    line = describe_choice(requested, choice, machines)
    if line and rank == 0 and first_time(("engine", line)):
        sys.stderr.write(f"barnraise: {line}\n")
        sys.stderr.flush()


def _call_original(original: Function, bound: inspect.BoundArguments) -> Any:
    return original(*bound.args, **bound.kwargs)


# rendezvous


def _rendezvous_handler(original: Function, ours: Callable[[str], bool]) -> Function:
    def meet(url: str, **options: Any) -> Any:
        if not _is_launched() or not ours(url):
            return original(url, **options)
        from barnraise.collectives.cluster_store import launched_rendezvous

        return launched_rendezvous(url, **options)

    return meet


class LaunchedTcpStore(TCPStore):
    """TCPStore for scripts that open their own store at the address in the environment."""

    def __new__(cls, host_name: str = "", port: int = 0, *args: Any, **options: Any) -> Any:
        if host_name != NO_HOST or not _is_launched():
            return super().__new__(cls)
        from barnraise.collectives.cluster_store import launched_store

        timeout = next((value for value in args if isinstance(value, timedelta)), options.get("timeout"))
        return PrefixStore(f"tcp/{port}", launched_store(timeout))
