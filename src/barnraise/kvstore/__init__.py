"""Replicated key-value store of a cluster: primary-backup replication with view changes. Pure.

The protocol is viewstamped replication. The primary of a view numbers the operations and appends them to the
logs of its backups. It answers a client once a quorum has acknowledged the operation. A new primary first
runs a view change: it collects promises under a new ballot and starts from the newest log.

``membership.consensus`` agrees on one value at a time and keeps it on disk. This package replicates a log and
takes its views from there. Decision record 34 compares both protocols. The store of keys is in memory; the
journals are the same replica with rules that keep it on disks (decision record 80).

May import ``agent_client`` and what is below it; never torch. Sockets and clocks do not belong here: an
agent owns one `KvReplica` and performs its effects.
"""

from barnraise.kvstore.messages import (
    Effect,
    ReplicaAnswer,
    ReplicaNote,
    ReplicaSend,
    ReplicaView,
    decode_message,
    encode_message,
)
from barnraise.kvstore.replica import KvReplica
from barnraise.kvstore.store import KeyValueStore

__all__ = [
    "Effect",
    "KeyValueStore",
    "KvReplica",
    "ReplicaAnswer",
    "ReplicaNote",
    "ReplicaSend",
    "ReplicaView",
    "decode_message",
    "encode_message",
]
