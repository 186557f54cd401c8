"""History of the cluster at one node: the newest decision, its view, and the trust log. Pure."""

from __future__ import annotations

from barnraise.core.errors import BarnraiseError, TrustError
from barnraise.identity import NodeId
from barnraise.identity.trust import TrustLog, decode_entry, encode_entry
from barnraise.membership.consensus.paxos import AcceptorState, PaxosDecision, founded
from barnraise.membership.effects import SaveState
from barnraise.membership.messages import DecisionMessage, Heartbeat
from barnraise.membership.view import MembershipView, PresentMember, read_view

_LOG_AT_ONCE = 1200


class History:
    """Newest decision, view and trust log. Every change returns the state to save."""

    def __init__(self, record: AcceptorState, log: TrustLog) -> None:
        self.record = record
        self._set_view(read_view(record.decided))
        self._set_log(log)

    @property
    def decided(self) -> PaxosDecision:
        return self.record.decided

    def role(self, node: bytes) -> str | None:
        return self._roles.get(node)

    def member(self, node: bytes) -> PresentMember | None:
        """Return the member of the view with this node id, or None."""
        return self.members.get(node)

    def record_answer(self, record: AcceptorState) -> SaveState:
        """Store a promise or a vote that was given."""
        self.record = record
        return SaveState(record)

    def adopt(self, decision: PaxosDecision, log: TrustLog) -> SaveState:
        """Put a decision and its trust log in force."""
        self.record = founded(decision)
        self._set_view(read_view(decision))
        return self.keep_log(log)

    def keep_log(self, log: TrustLog) -> SaveState:
        """Replace the trust log, and save only the entries that differ."""
        old, new = self.log.entries, log.entries
        kept = 0
        while kept < min(len(old), len(new)) and (old[kept] is new[kept] or old[kept] == new[kept]):
            kept += 1
        self._set_log(log)
        return SaveState(self.record, kept, tuple(encode_entry(entry) for entry in new[kept:]))

    def with_entries_of(self, view: MembershipView) -> TrustLog:
        """Return the log as this view extends it. The caller has checked that it starts where ours ends."""
        log = self.log
        for data in view.entries:
            log = log.extended(decode_entry(data))
        return log

    def fault(self, decision: PaxosDecision) -> str | None:
        """Return what is wrong with a proposed view, or None."""
        length = len(self.log.entries)
        try:
            view = read_view(decision)
            if view.log_from != length:
                return f"it continues a trust log of {view.log_from} entries, ours has {length}"
            log = self.with_entries_of(view)
        except BarnraiseError as error:
            return error.message
        for member in view.members:
            role = log.role(NodeId(member.node))
            if role is None or (member.votes and role != "owner"):
                return f"{NodeId(member.node).short} may not be in it"
        return None

    def follow(self, message: DecisionMessage) -> tuple[TrustLog, bool]:
        """Return the log that a decision leads to, as far as we can follow, and whether it is complete.

        Raise BarnraiseError if it is not valid. On a branch that the user opened, the log may be another one.
        It is then read from its beginning and never mixed with ours.
        """
        entries = [decode_entry(data) for data in message.log]
        view = read_view(message.decision)
        log = self.log
        if message.decision.branch > self.decided.branch:
            if message.log_from or not entries:
                return log, False
            log = TrustLog.read(entries)
            if log.cluster != self.log.cluster:
                raise TrustError("it is the trust log of another cluster")
        else:
            for index, entry in enumerate(entries, message.log_from):
                if index >= len(log.entries):
                    log = log.extended(entry)
        for index, data in enumerate(view.entries, view.log_from):
            if index == len(log.entries):
                log = log.extended(decode_entry(data))
        return log, len(log.entries) >= view.log_from + len(view.entries)

    def differs_from(self, beat: Heartbeat) -> str | None:
        """Return "view" or "trust log" if there are two histories under one number, else None.

        This happens only if a disk or a key was copied.
        """
        if beat.branch != self.decided.branch:
            return None
        if beat.number == self.decided.number and beat.view != self.record.digest:
            return "view"
        known = beat.log_length <= len(self.log.entries)
        return "trust log" if known and self.log.head_at(beat.log_length) != beat.log_head else None

    def catch_up_message(self, log_length: int) -> DecisionMessage:
        """Return the message for a node whose log has ``log_length`` entries."""
        missing = self.log.entries[log_length : log_length + _LOG_AT_ONCE]
        return DecisionMessage(self.decided, log_length, tuple(encode_entry(entry) for entry in missing))

    def _set_view(self, view: MembershipView) -> None:
        self.view = view
        self.members = {member.node: member for member in view.members}

    def _set_log(self, log: TrustLog) -> None:
        self.log = log
        self._roles: dict[bytes, str] = {node.raw: member.role for node, member in log.members.items()}
