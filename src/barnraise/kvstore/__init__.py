"""The replicated key-value store of a cluster: primary-backup replication with view changes. Pure.

May import ``agent_client`` and what is below it; never torch.
An agent owns one `KvReplica` and performs its effects.
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
