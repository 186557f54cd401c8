"""``barnraise.init_process_group``: a group of machines that the script names, without agents or pairing.

The machines share a secret file. Through torch's store, which is not trusted, each rank says which key its
machine has, and proves that it knows the secret. Links are then encrypted between these keys, as in a
cluster.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from barnraise.collectives.rendezvous import read_values, wait_for_ranks
from barnraise.collectives.torch_patch.autoload import register
from barnraise.core.config import NetworkSettings, Settings, load_settings, state_path
from barnraise.core.errors import ConfigError, ProtocolError
from barnraise.discovery.static import StaticPeer, parse_peer
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.private_file import private_directory
from barnraise.identity.secret import load_secret

_CONTEXT = b"barnraise peers 1"
_NODE_BYTES = 32
_MAX_PORT = 65535
_LINGER_S = 5.0
_HINT = "Start the script on every machine, with the same peers, and check that their ports are open."


@dataclass
class _Meeting:
    """State of all groups of this process: the settings before the first one, and one store."""

    settings: Settings
    rank: int
    places: Sequence[StaticPeer]
    store: dist.TCPStore | None = None
    groups: int = 0


_meeting: _Meeting | None = None


def init_process_group(
    peers: Sequence[str],
    rank: int,
    *,
    secret_file: str | os.PathLike[str] | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Create the default group of torch.distributed from the addresses of all ranks.

    ``peers``: ``host`` or ``host:port`` of each rank's machine, equal on all ranks. ``rank``: the place of
    this process in it. ``secret_file``: file with at least 32 random bytes, equal on all machines; by default
    the setting `trust.secret_file`. Each machine needs its port, and the first one the next port, too.
    """
    meeting = _meet(_places(peers, rank), rank)
    path = _secret_path(secret_file, meeting.settings)
    secret = load_secret(path)
    if isinstance(timeout, int | float):
        timeout = timedelta(seconds=timeout)
    patience = timedelta(seconds=meeting.settings.collectives.timeout_s) if timeout is None else timeout
    first, own = meeting.places[0], meeting.places[rank]
    directory = private_directory(state_path(meeting.settings) / f"peers-{own.port}")
    node = NodeKey.load_or_create(directory / "node.key").id
    if meeting.store is None:
        meeting.store = dist.TCPStore(
            first.host, first.port + 1, len(peers), rank == 0, patience, wait_for_workers=False
        )
    meeting.groups += 1  # all ranks make equally many
    store = dist.PrefixStore(f"group/{meeting.groups}", meeting.store)
    nodes = exchange_nodes(store, rank, meeting.places, secret, node, patience.total_seconds())
    _use(own, directory, path, nodes)
    register()
    dist.init_process_group("barnraise", store=store, rank=rank, world_size=len(peers), timeout=timeout)


def exchange_nodes(
    store: dist.Store,
    rank: int,
    places: Sequence[StaticPeer],
    secret: bytes,
    node: NodeId,
    timeout_s: float,
) -> tuple[NodeId, ...]:
    """Publish the key of this machine, and return the keys of all ranks.

    Raise ProtocolError if a rank does not prove that it has the same secret and peers.
    """
    keys = [f"peer/{other}" for other in range(len(places))]
    entry = node.raw + _proof(secret, places, rank, node.raw)
    store.set(keys[rank], entry)  # type: ignore[arg-type]  # bytes are taken too
    wait_for_ranks(store, keys, timeout_s, _HINT)
    entries = read_values(store, keys)
    store.set(_read_key(rank), "1")
    try:
        return tuple(_proved(each, secret, places, other) for other, each in enumerate(entries))
    except ProtocolError:
        if rank == 0:  # the store ends with this process, and the others shall see the same error
            with suppress(RuntimeError):
                store.wait([_read_key(other) for other in range(len(places))], timedelta(seconds=_LINGER_S))
        raise


def _read_key(rank: int) -> str:
    return f"read/{rank}"


def _proved(entry: bytes, secret: bytes, places: Sequence[StaticPeer], rank: int) -> NodeId:
    raw, proof = entry[:_NODE_BYTES], entry[_NODE_BYTES:]
    if len(raw) != _NODE_BYTES or not hmac.compare_digest(proof, _proof(secret, places, rank, raw)):
        raise ProtocolError(
            f"rank {rank} has another secret, or other peers",
            hint="Copy one secret file to all machines, and give every rank the same peers in one order.",
        )
    return NodeId(raw)


def _proof(secret: bytes, places: Sequence[StaticPeer], rank: int, raw: bytes) -> bytes:
    listed = ",".join(f"[{place.host}]:{place.port}" for place in places)
    return hmac.digest(secret, b"\0".join((_CONTEXT, listed.encode(), str(rank).encode(), raw)), "sha256")


def _places(peers: Sequence[str], rank: int) -> list[StaticPeer]:
    if os.environ.get("BARNRAISE_LAUNCHED"):
        raise ConfigError(
            "this process was started by `barnraise run`, which knows the machines of the run",
            hint="Call torch.distributed.init_process_group() instead.",
        )
    if isinstance(peers, str) or not peers:
        raise ConfigError("peers is not a list of addresses", hint='Write it as peers=["pc", "nas:52500"].')
    if not 0 <= rank < len(peers):
        raise ConfigError(
            f"rank {rank} is not among {len(peers)} peers", hint="Use the place of this machine in the list."
        )
    try:
        places = [parse_peer(text, NetworkSettings().port) for text in peers]
    except ConfigError as error:
        raise ConfigError(f"an address of peers is wrong: {error.message}", hint=error.hint) from error
    if places[0].port == _MAX_PORT:
        raise ConfigError(
            f"there is no port after {_MAX_PORT}, which the first machine needs",
            hint="Give the first peer a lower port.",
        )
    return places


def _secret_path(secret_file: str | os.PathLike[str] | None, settings: Settings) -> Path:
    chosen = settings.trust.secret_file if secret_file is None else os.fspath(secret_file)
    if chosen is None:
        raise ConfigError(
            "a group of named machines needs a secret that they share",
            hint="Write one with `openssl rand -hex 32 > secret`, copy it to all machines with mode 0600, "
            "and pass it as secret_file.",
        )
    return Path(chosen).expanduser().absolute()


def _meet(places: Sequence[StaticPeer], rank: int) -> _Meeting:
    global _meeting
    if _meeting is None:
        _meeting = _Meeting(load_settings(), rank, places)
    if (_meeting.rank, _meeting.places) != (rank, places):
        raise ConfigError(
            "the peers or the rank of this process have changed since its first group",
            hint="Start a new process for other peers.",
        )
    return _meeting


def _use(own: StaticPeer, directory: Path, secret_file: Path, nodes: tuple[NodeId, ...]) -> None:
    """Set what the communication process and its listener read when they start."""
    os.environ["BARNRAISE_STATE_DIRECTORY"] = str(directory)
    os.environ["BARNRAISE_NETWORK_PORT"] = str(own.port)
    os.environ["BARNRAISE_TRUST_SECRET_FILE"] = str(secret_file)
    os.environ["BARNRAISE_TRUST_NODES"] = ",".join(dict.fromkeys(map(str, nodes)))
    if own.literal:
        os.environ["BARNRAISE_NETWORK_ADDRESSES"] = own.host
