"""Connects the endpoints of all workers, or refuses to if a worker belongs to a guest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from barnraise.agent_client.roles import ask_roles
from barnraise.agent_client.run_requests import RolesResponse
from barnraise.collectives.c10d.create import close_pairs, open_pairs
from barnraise.core.config import load_settings
from barnraise.core.errors import ProtocolError, RunError
from barnraise.core.flow.console_log import install_console_log
from barnraise.rpc.channel import PeerChannel
from barnraise.rpc.endpoint import RpcEndpoint
from barnraise.rpc.registry import FunctionRegistry
from barnraise.runs.participants import not_owners

if TYPE_CHECKING:
    from barnraise.training.session import Session

_ROW_BYTES = 4096
_LENGTH_BYTES = 2
_GUEST_HINT = "Name only owners' machines with `--on`: a remote call runs functions of the script there."


class _World(NamedTuple):
    """Rank, number of workers, and the all-gather of one row of bytes from each of them."""

    rank: int
    size: int
    gather: Callable[[torch.Tensor], torch.Tensor]


def connect(
    registry: FunctionRegistry, session: Session | None, threads: int, timeout_s: float
) -> tuple[RpcEndpoint, dict[int, PeerChannel]]:
    """Return the endpoint of this worker, and its channels to the others, not started. All workers call it.

    Raise RunError in a run with a guest, and without a group.
    """
    install_console_log()
    roles = ask_roles(
        load_settings(),
        os.environ.get("BARNRAISE_RUN", ""),
        launched=bool(os.environ.get("BARNRAISE_LAUNCHED")),
    )
    if (error := refusal(roles, ())) is not None:
        raise error
    world = _world_of_script(timeout_s) if session is None else _world_of_session(session)

    def gather(message: bytes) -> list[bytes]:
        rows = world.gather(encode_row(message))
        return [decode_row(bytes(row.cpu().numpy())) for row in rows.view(world.size, _ROW_BYTES)]

    pairs = open_pairs(world.rank, world.size, gather, timeout_s)
    error = refusal(roles, [node for pair in pairs.values() for node in pair.nodes])
    if error is not None:
        close_pairs(pairs.values())
        raise error
    endpoint = RpcEndpoint(world.rank, world.size, registry, threads)
    channels = {
        rank: PeerChannel(rank, pair, endpoint.receive, endpoint.lose) for rank, pair in pairs.items()
    }
    return endpoint, channels


def refusal(roles: RolesResponse | None, nodes: Sequence[bytes]) -> RunError | None:
    """Return the reason why these machines may not call each other, or None.

    ``nodes``: those of the other workers, proved by their links. Without an agent, trust is a setting.
    """
    if roles is None:
        return None
    guests = roles.run_guests or (not_owners(roles, nodes) if roles.guests else ())
    if not guests:
        return None
    names = " and ".join(guests)
    return RunError(f"{names} takes part as a guest, so there are no remote calls", hint=_GUEST_HINT)


def encode_row(message: bytes) -> torch.Tensor:
    """Return a message as a row of fixed size: its length, the message, and zeros."""
    if len(message) > _ROW_BYTES - _LENGTH_BYTES:
        raise RunError(
            f"the addresses of this worker have {len(message)} bytes, more than fit into {_ROW_BYTES}",
            hint="Name fewer addresses in the setting network.addresses.",
        )
    row = len(message).to_bytes(_LENGTH_BYTES, "little") + message
    return torch.frombuffer(bytearray(row.ljust(_ROW_BYTES, b"\0")), dtype=torch.uint8)


def decode_row(row: bytes) -> bytes:
    """Return the message of a row. Raise ProtocolError if the row is malformed."""
    length = int.from_bytes(row[:_LENGTH_BYTES], "little")
    if len(row) != _ROW_BYTES or length > _ROW_BYTES - _LENGTH_BYTES:
        raise ProtocolError("a row of a worker's addresses is malformed")
    return row[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _world_of_script(timeout_s: float) -> _World:
    if not dist.is_initialized():
        raise RunError(
            "rpc.start needs the workers of a group",
            hint='Call init_process_group("barnraise") first, or rpc.start(run) with a session.',
        )
    size = dist.get_world_size()
    # NCCL moves tensors of its devices only.
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def gather(row: torch.Tensor) -> torch.Tensor:
        own = row.to(device)
        rows = [torch.empty_like(own) for _ in range(size)]
        # The timeout of the group may be half an hour.
        dist.all_gather(rows, own, async_op=True).wait(timedelta(seconds=timeout_s))
        return torch.cat(rows)

    return _World(dist.get_rank(), size, gather)


def _world_of_session(session: Session) -> _World:
    return _World(session.rank, session.world, session.gather)
