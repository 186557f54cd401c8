"""The replicated key-value store of a cluster: primary-backup replication with view changes. Pure.

May import ``agent_client`` and what is below it; never torch.
An agent owns one `Replica` and performs its effects.
"""

from barnraise.kvstore.messages import Answer, Effect, Note, ReplicaView, Send, decode_message, encode_message
from barnraise.kvstore.replica import Replica
from barnraise.kvstore.store import Board

__all__ = [
    "Answer",
    "Board",
    "Effect",
    "Note",
    "Replica",
    "ReplicaView",
    "Send",
    "decode_message",
    "encode_message",
]
