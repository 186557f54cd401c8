"""``barnraise.device_mesh``: a mesh of all ranks for FSDP2, made of measured links."""

from __future__ import annotations

import logging
import os
import socket
import sys

import torch
import torch.distributed as dist
from blake3 import blake3
from torch.distributed.device_mesh import DeviceMesh

from barnraise.core.errors import BarnraiseError, RunError
from barnraise.planning.cost.mesh_layout import MeshLayout, MeshRank, choose_mesh
from barnraise.training.device_placement import device_of_worker
from barnraise.training.group.agent_client import WorkerId, read_topology
from barnraise.training.pipeline.machine_memory import free_memory

log = logging.getLogger("barnraise")

_MACHINE_BYTES = 32  # of a machine's name, as a hash
_NO_MESH = -1


def device_mesh(needs: int = 0, *, device_type: str | None = None) -> DeviceMesh:
    """Return a mesh of all ranks: with dimension ``shard``, or with ``replicate`` and ``shard``.

    ``needs``: bytes of the whole state, such as parameters, gradients and optimizer. The shard groups are the
    smallest ones that have this memory, over the fastest links. With 0, a shard group is a machine with
    several ranks, or else all ranks. ``device_type``: of the model; by default that of the worker's device.
    All ranks call it, after ``init_process_group``.
    """
    if not dist.is_initialized():
        raise RunError(
            "device_mesh needs the process group", hint="Call torch.distributed.init_process_group() first."
        )
    own = device_of_worker()
    device = own if device_type in (None, own.type) else torch.device(str(device_type))
    rows = _agree(_gather_ranks(device), needs, device)
    names = ("shard",) if len(rows) == 1 else ("replicate", "shard")
    return DeviceMesh(device.type, rows[0] if len(rows) == 1 else rows, mesh_dim_names=names)


def _gather_ranks(device: torch.device) -> list[MeshRank]:
    """Return the machine and the memory of each rank."""
    machine = os.environ.get("BARNRAISE_NODE") or socket.gethostname()
    own = torch.tensor(
        [*blake3(machine.encode()).digest(_MACHINE_BYTES), *free_memory(device).to_bytes(8, "little")],
        dtype=torch.uint8,
        device=device,
    )
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    ranks = []
    for each in gathered:
        data = bytes(each.tolist())
        ranks.append(MeshRank(data[:_MACHINE_BYTES].hex(), int.from_bytes(data[_MACHINE_BYTES:], "little")))
    if device.type != "cpu":
        return ranks
    machines = [rank.machine for rank in ranks]  # their processes share its memory
    return [rank._replace(memory_bytes=rank.memory_bytes // machines.count(rank.machine)) for rank in ranks]


def _agree(ranks: list[MeshRank], needs: int, device: torch.device) -> list[list[int]]:
    """Return the layout that rank 0 has chosen. All ranks raise the same error if there is none."""
    chosen = torch.full((len(ranks) + 1,), _NO_MESH, dtype=torch.int64, device=device)
    error: RunError | None = None
    if dist.get_rank() == 0:
        try:
            layout = choose_mesh(ranks, _measured_rates(), needs)
            _print_layout(layout)
            order = [rank for group in layout.shard_groups for rank in group]
            chosen = torch.tensor([len(layout.shard_groups), *order], dtype=torch.int64, device=device)
        except RunError as failure:
            error = failure
    dist.broadcast(chosen, 0)
    count, *order = map(int, chosen.tolist())
    if count == _NO_MESH:
        raise error or RunError(
            "rank 0 found no mesh for these ranks", hint="Its own error says what is missing."
        )
    size = len(order) // count
    return [order[at : at + size] for at in range(0, len(order), size)]


def _measured_rates() -> dict[frozenset[str], float]:
    """Return the Mbit/s between machines; empty without an agent."""
    worker = WorkerId.from_environment()
    if worker is None:
        return {}
    try:
        graph = read_topology(worker.state)
    except BarnraiseError as error:
        log.warning("the mesh is made without measured links: %s", error.message)
        return {}
    return {
        frozenset(blake3(node.encode()).hexdigest() for node in (link.a, link.b)): link.mbps
        for link in graph.links
        if link.mbps is not None
    }


def _print_layout(layout: MeshLayout) -> None:
    sys.stderr.write(f"barnraise: device mesh: {layout.why}\n")
    sys.stderr.flush()
