"""Lets a script that `barnraise run` started use torch.distributed as it always did.

Its ranks meet in the cluster whatever address it names, and each group gets the engine that `runs.engines`
chooses. Only the public functions of torch that make groups and stores are wrapped, wherever torch has them.
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
from torch.distributed.constants import default_pg_timeout

from barnraise.collectives.rendezvous import values_of
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

# What launched processes find as MASTER_ADDR. The launcher names it too (a test compares them): its module
# would bring far more into `import torch` than this one word.
NO_HOST = "barnraise.invalid"

Function = Callable[..., Any]


class LaunchEnvironment(NamedTuple):
    """What the launcher fixed: the machine of every rank, and what this one computes on."""

    rank: int
    machines: tuple[int, ...]
    device: str
    forced: str
    fabric: str

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LaunchEnvironment:
        try:
            rank = int(environment["RANK"])
            machines = tuple(int(one) for one in environment["BARNRAISE_MACHINES"].split(","))
            if not 0 <= rank < len(machines):
                raise ValueError(f"there is no rank {rank} among {len(machines)}")
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"this process has no place in a run: RANK or BARNRAISE_MACHINES is missing or bad: {error}",
                hint="Let `barnraise run` start it, or unset BARNRAISE_LAUNCHED.",
            ) from None
        return cls(
            rank,
            machines,
            environment.get("BARNRAISE_DEVICE", "cpu"),
            environment.get("BARNRAISE_ENGINE", "auto"),
            environment.get("BARNRAISE_FABRIC", "untrusted"),
        )


class WorldSpec(NamedTuple):
    """The ranks of the default group as they told of themselves, where they are, and what they got."""

    launch: LaunchEnvironment
    ranks: tuple[RankDevices, ...]
    machines: tuple[int, ...]
    backend: str


_installed = False
_world: WorldSpec | None = None
_exchanges = count(1)


def install() -> None:
    """Wrap torch's functions, once."""
    global _installed
    if _installed or not _is_launched():
        return
    _installed = True
    _replace("init_process_group", _wrapped(dist.init_process_group, _init_process_group))
    _replace("new_group", _wrapped(dist.new_group, _new_group))
    _replace("split_group", _wrapped(dist.split_group, _split_group))
    _replace("TCPStore", StoreAnywhere)
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers["env"] = _handler(handlers["env"], lambda url: True)
    handlers["tcp"] = _handler(handlers["tcp"], lambda url: urlparse(url).hostname == NO_HOST)
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if several and os.environ.get("BARNRAISE_DEVICE") in ("cpu", "mps"):
        # Without this Accelerate would let each such process train alone, and not say so.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _is_launched() -> bool:
    """Not in the processes that a launched one starts by multiprocessing: they are no ranks of the run."""
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
        except TypeError:  # torch says it in its own words
            return original(*args, **kwargs)
        return inner(original, bound) if _is_launched() else original(*args, **kwargs)

    return call


# groups


def _init_process_group(original: Function, bound: inspect.BoundArguments) -> None:
    global _world
    given = bound.arguments
    if dist.is_initialized():
        _call(original, bound)  # it says that this is the second time
        return
    launch = LaunchEnvironment.read(os.environ)
    own = RankDevices(_text(given.get("backend")), launch.device, _nccl_available(), sys.platform)
    size = given.get("world_size", -1)
    if given.get("rank", -1) in (-1, launch.rank) and size in (-1, len(launch.machines)):
        ranks, machines = _exchange(launch, own, given.get("timeout") or default_pg_timeout), launch.machines
    else:  # the script numbers its processes itself: nobody knows where the others are
        ranks = (own,) * max(size, 1)
        apart = len(set(launch.machines)) > 1
        machines = tuple(range(len(ranks))) if apart else (0,) * len(ranks)
    choice = choose_group_backend(ranks, machines, launch.forced, launch.fabric)
    _announce(own.asked, choice, machines, launch.rank)
    if choice.backend != default_backend(own.asked, launch.device):
        _give(given, choice, own.asked)
    _call(original, bound)
    _world = WorldSpec(launch, ranks, machines, choice.backend)


def _new_group(original: Function, bound: inspect.BoundArguments) -> Any:
    given, world = bound.arguments, _world
    members = given.get("ranks")
    numbers = range(len(world.ranks) if world else 0) if members is None else sorted(members)
    if world is None or not numbers or not 0 <= numbers[0] <= numbers[-1] < len(world.ranks):
        return _call(original, bound)  # torch knows what is wrong
    asked = _text(given.get("backend"))
    ranks = [world.ranks[number] for number in numbers]
    if asked is not None:
        ranks = [RankDevices(asked, rank.device, rank.nccl_available, rank.system) for rank in ranks]
    machines = [world.machines[number] for number in numbers]
    choice = choose_group_backend(ranks, machines, world.launch.forced, world.launch.fabric)
    _announce(asked or ranks[0].asked, choice, machines, world.launch.rank)
    # Without a name torch takes that of the default group.
    if choice.backend != (world.backend if asked is None else asked):
        _give(given, choice, asked)
    elif choice.backend == OURS:
        _drop(given, "the barnraise engine has no use for it")
    return _call(original, bound)


def _split_group(original: Function, bound: inspect.BoundArguments) -> Any:
    """What torch has for NCCL only, by way of new groups."""
    given = bound.arguments
    parent, splits = given.get("parent_pg") or dist.group.WORLD, given.get("split_ranks")
    if not splits or parent is None or dist.get_backend(parent) != OURS:
        return _call(original, bound)
    numbers = dist.get_process_group_ranks(parent)
    named = {name: given[name] for name in ("timeout", "group_desc") if given.get(name) is not None}
    mine = None
    for split in splits:
        members = sorted(numbers[place] for place in split)
        here = dist.get_rank() in members
        # Only where all ranks call this can all take part in making each group.
        if parent is dist.group.WORLD:
            group = dist.new_group(members, **named)
        elif here:
            group = dist.new_group(members, use_local_synchronization=True, **named)
        if here:
            mine = group
    return mine


def _exchange(launch: LaunchEnvironment, own: RankDevices, timeout: timedelta) -> tuple[RankDevices, ...]:
    """What each rank tells of itself. Devices differ, and scripts ask by device: so all choose alike."""
    from barnraise.collectives.cluster_store import launched_store

    if len(launch.machines) == 1:
        return (own,)
    store = launched_store(timeout)
    meeting = next(_exchanges)
    keys = [f"engine/{meeting}/rank {number}" for number in range(len(launch.machines))]
    store.set(keys[launch.rank], encode_rank(own))  # type: ignore[arg-type]  # bytes are taken too
    told = [decode_rank(data, number) for number, data in enumerate(values_of(store, keys))]
    told[launch.rank] = own
    return tuple(told)


def _nccl_available() -> bool:
    return dist.is_nccl_available() and torch.cuda.is_available()


def _text(backend: str | None) -> str | None:
    return str(backend).lower() if backend else None


def _give(given: dict[str, Any], choice: BackendChoice, asked: str | None) -> None:
    given["backend"] = choice.backend
    _drop(given, f"the group uses {choice.backend} instead of {asked or 'the default of torch'}")


def _drop(given: dict[str, Any], why: str) -> None:
    for name in ("pg_options", "device_id"):
        if given.get(name) is not None:
            log.info("%s is left out: %s", name, why)
            given[name] = None


def _announce(asked: str | None, choice: BackendChoice, machines: Sequence[int], rank: int) -> None:
    line = describe_choice(asked, choice, machines)
    if line and rank == 0 and first_time(("engine", line)):
        sys.stderr.write(f"barnraise: {line}\n")
        sys.stderr.flush()


def _call(original: Function, bound: inspect.BoundArguments) -> Any:
    return original(*bound.args, **bound.kwargs)


# places to meet


def _handler(original: Function, ours: Callable[[str], bool]) -> Function:
    def meet(url: str, **options: Any) -> Any:
        if not _is_launched() or not ours(url):
            return original(url, **options)
        from barnraise.collectives.cluster_store import launched_rendezvous

        return launched_rendezvous(url, **options)

    return meet


class StoreAnywhere(TCPStore):
    """For scripts that make their own store at the address they find in the environment."""

    def __new__(cls, host_name: str = "", port: int = 0, *args: Any, **options: Any) -> Any:
        if host_name != NO_HOST or not _is_launched():
            return super().__new__(cls)
        from barnraise.collectives.cluster_store import launched_store

        timeout = next((one for one in args if isinstance(one, timedelta)), options.get("timeout"))
        return PrefixStore(f"tcp/{port}", launched_store(timeout))
