"""What the agents hold together for the runs: the board, its copies, and how processes meet on it. Pure.

May import ``local`` and what is below it; never torch. An agent owns one `Replica` and performs its effects.
"""

from barnraise.runs.board import Board
from barnraise.runs.replica import Replica
from barnraise.runs.replication import Answer, Effect, Note, ReplicaView, Send, decode_message, encode_message

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
