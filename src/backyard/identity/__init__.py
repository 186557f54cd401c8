"""Who a machine is and what its workers may say in its name. Imports core."""

from backyard.identity.delegation import (
    WORKER_BYTES,
    WorkerCredentials,
    WorkerIdentity,
    anchor,
    delegate,
    read_worker,
)
from backyard.identity.keys import NodeKey
from backyard.identity.node_id import NodeId

__all__ = [
    "WORKER_BYTES",
    "NodeId",
    "NodeKey",
    "WorkerCredentials",
    "WorkerIdentity",
    "anchor",
    "delegate",
    "read_worker",
]
