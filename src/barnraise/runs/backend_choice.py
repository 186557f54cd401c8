"""Choice of the c10d backend of a process group: the one that the script named, or ours. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode

OURS = "barnraise"
AUTO = "auto"
TRUSTED = "trusted"

_PLAINTEXT = "Gloo and NCCL send plaintext and do not work between operating systems"
_TORCH_BACKENDS = frozenset({"gloo", "nccl"})
_SENDS_NOTHING = frozenset({"fake"})

Name = Annotated[str, Meta(max_length=200)]


class BackendChoice(msgspec.Struct, frozen=True):
    """Backend in torch's notation, and the reason for it."""

    backend: str
    reason: str


class RankDevices(msgspec.Struct, frozen=True, array_like=True):
    """Facts that a rank sends to the others before the choice; ``requested`` is None if the script named no
    backend.
    """

    requested: Name | None
    device: Annotated[str, Meta(max_length=64)]
    nccl_available: bool
    system: Annotated[str, Meta(max_length=64)]


def encode_rank(rank: RankDevices) -> bytes:
    """Encode the facts of one rank."""
    return msgspec.msgpack.encode(rank)


def decode_rank(data: bytes, number: int) -> RankDevices:
    """Decode the facts of a rank; raise ProtocolError if they are malformed."""
    return decode(_ranks, data, f"the facts of rank {number} cannot be read")


_ranks = msgspec.msgpack.Decoder(RankDevices)


def choose_group_backend(
    ranks: Sequence[RankDevices], machines: Sequence[int], forced: str, fabric: str
) -> BackendChoice:
    """Choose the same backend on every rank, because each rank knows the facts of all. ``machines``: by
    rank.

    On an untrusted network no other machine can cause a plaintext backend between machines.
    """
    requested = {None if rank.requested is None else rank.requested.lower() for rank in ranks}
    first = ranks[0].requested
    choice = choose_backend(
        first,
        tuple(machines),
        ",".join(sorted({rank.device for rank in ranks})),
        forced,
        fabric,
        all(rank.nccl_available for rank in ranks),
        tuple(sorted({rank.system for rank in ranks})),
    )
    if len(requested) > 1 and forced == AUTO and choice.backend != OURS:
        named = ", ".join(sorted(name or "none" for name in requested))
        return BackendChoice(OURS, f"its ranks ask for different backends ({named})")
    return choice


def choose_backend(
    requested: str | None,
    machines: tuple[int, ...],
    device: str,
    forced: str = AUTO,
    fabric: str = "untrusted",
    nccl_available: bool = False,
    systems: tuple[str, ...] = ("linux",),
) -> BackendChoice:
    """Choose the backend of a group with ranks on these machines and devices (separated by commas)."""
    spans = len(set(machines)) > 1
    wanted = default_backend(requested, device)
    names = _names(wanted)
    if names <= _SENDS_NOTHING:
        return BackendChoice(wanted, "it sends nothing")
    if forced != AUTO:
        return BackendChoice(forced, "it was forced with --engine")
    if names == {OURS}:
        return BackendChoice(OURS, "the script asks for it")
    if spans and fabric != TRUSTED:
        known = names <= _TORCH_BACKENDS | {OURS}
        return BackendChoice(
            OURS, _PLAINTEXT if known else f"{wanted} is not known to encrypt what it sends between machines"
        )
    obstacle = _obstacle(names, _kinds(device), nccl_available, systems if spans else ())
    if obstacle:
        return BackendChoice(OURS, obstacle)
    return BackendChoice(wanted, "the fabric is trusted" if spans else "the group is within one machine")


def default_backend(requested: str | None, device: str) -> str:
    """Return the requested backend in torch's spelling, or torch's default for the device."""
    if requested:
        return requested.lower()
    return "nccl" if _kinds(device) == {"cuda"} else "gloo"


def describe_choice(requested: str | None, choice: BackendChoice, machines: Sequence[int]) -> str | None:
    """Return a sentence about the choice; None if the script gets what it asked for, without plaintext."""
    plain = len(set(machines)) > 1 and bool(_names(choice.backend) - {OURS} - _SENDS_NOTHING)
    kept = choice.backend == requested.lower() if requested else choice.backend != OURS
    if kept and not plain:
        return None
    instead = "" if kept else f" instead of {requested or 'the default of torch'}"
    warning = "; it sends plaintext" if plain else ""
    group = f"the group of {_counted(len(machines), 'rank')} on {_counted(len(set(machines)), 'machine')}"
    return f"{group} uses {choice.backend}{instead}: {choice.reason}{warning}"


def _obstacle(names: frozenset[str], kinds: set[str], nccl_available: bool, systems: Sequence[str]) -> str:
    """Return why torch's backends cannot serve this group. ``systems``: set only if it spans machines."""
    if "nccl" in names and kinds != {"cuda"}:
        return f"NCCL needs CUDA on every rank, and these compute on {', '.join(sorted(kinds))}"
    if "nccl" in names and not nccl_available:
        return "this torch has no NCCL, or sees no CUDA device"
    if "gloo" in names and "mps" in kinds:
        return "Gloo does not support MPS tensors"
    if "gloo" in names and set(systems) - {"linux"}:
        return f"Gloo works between machines on Linux only, and these run {', '.join(systems)}"
    return ""


def _names(backend: str) -> frozenset[str]:
    """Return the backends in a text such as ``gloo`` or ``cpu:gloo,cuda:nccl``."""
    return frozenset(part.rpartition(":")[2].strip() for part in backend.lower().split(","))


def _kinds(device: str) -> set[str]:
    return {part.partition(":")[0].strip() for part in device.lower().split(",")}


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
