"""History of the cluster at one node: view, trust log, and which decisions of others it accepts. Pure.

A decision from another node counts only with proof. Each link of the chain has the signatures of a quorum of
the voters before it. A branch that a person opened elsewhere needs more: a quorum of the voters that
this node knows, or the word of its own person. Removed machines stay removed on every branch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from barnraise.core.errors import BarnraiseError, TrustError
from barnraise.identity import NodeId
from barnraise.identity.trust import TrustLog, decode_entry, encode_entry
from barnraise.membership.consensus.certificate import CertifiedDecision, check_link
from barnraise.membership.consensus.paxos import AcceptorState, PaxosDecision, founded
from barnraise.membership.consensus.quorum import is_quorum
from barnraise.membership.effects import SaveState
from barnraise.membership.messages import DecisionMessage, Heartbeat
from barnraise.membership.view import MembershipView, PresentMember, check_branch, read_view

MOST_LINKS = 4096
_LOG_AT_ONCE = 1200
_BYTES_AT_ONCE = 256 << 10


class StoredHistory(NamedTuple):
    """State of a history on disk. ``removed``: machines that any trust log of this node ever removed."""

    record: AcceptorState
    log: TrustLog
    chain: tuple[CertifiedDecision, ...] = ()
    removed: frozenset[bytes] = frozenset()


class FollowedChain(NamedTuple):
    """Proven decisions: how many own links stay, the links after them, and the trust log that follows."""

    kept: int
    links: tuple[CertifiedDecision, ...]
    log: TrustLog


class History:
    """Chain of decisions, view and trust log. Every change returns the state to save."""

    def __init__(self, stored: StoredHistory) -> None:
        self.record = stored.record
        self.removed = stored.removed | {node.raw for node in stored.log.revoked}
        self._set_view(read_view(stored.record.decided))
        self._set_log(stored.log)
        chain = stored.chain or (CertifiedDecision(stored.record.decided),)
        self._set_chain(chain, tuple(link.decision.digest for link in chain))

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

    def adopt(self, followed: FollowedChain) -> SaveState:
        """Put the newest of these decisions and the trust log in force."""
        decision = followed.links[-1].decision
        self.record = founded(decision)
        self._set_view(read_view(decision))
        digests = (*self._digests[: followed.kept], *(link.decision.digest for link in followed.links))
        self._set_chain((*self.chain[: followed.kept], *followed.links), digests)
        removed = {node.raw for node in followed.log.revoked} - self.removed
        self.removed |= removed
        kept = _common_length(self.log, followed.log)
        self._set_log(followed.log)
        entries = tuple(encode_entry(entry) for entry in followed.log.entries[kept:])
        return SaveState(self.record, kept, entries, followed.links, frozenset(removed))

    def extended_by(self, link: CertifiedDecision) -> FollowedChain:
        """Return the chain with a decision that this node itself has just seen decided."""
        return FollowedChain(len(self.chain), (link,), _extended(self.log, read_view(link.decision)))

    def fault(self, decision: PaxosDecision, me: bytes, absent: Collection[bytes]) -> str | None:
        """Return what is wrong with a proposed view, or None.

        ``absent``: voters that the person at this machine has declared gone.
        """
        length = len(self.log.entries)
        try:
            view = read_view(decision)
            if view.log_from != length:
                return f"it continues a trust log of {view.log_from} entries, ours has {length}"
            check_branch(self.decided, decision, view)
            _check_members(view, _extended(self.log, view))
            if view.declaration is not None and view.declaration.node != me:
                self._check_endorsed(len(self.chain) - 1, {view.declaration.node, me}, absent)
        except BarnraiseError as error:
            return error.message
        return None

    def follow(
        self, message: DecisionMessage, agreeing: Collection[bytes], absent: Collection[bytes]
    ) -> FollowedChain | None:
        """Return the proven decisions of a message, or None if links between ours and them are missing.

        ``agreeing``: this node, and those that say themselves that they are on the branch of the message.
        Raise BarnraiseError if the decisions are not proven or may not be followed.
        """
        if not self.decided.number:
            return self._first(message)
        links = list(message.links)
        anchor = None
        while links and (place := self._places.get(links[0].decision.digest)) is not None:
            anchor = place
            del links[0]
        if not links:
            return None
        if anchor is None:
            anchor = self._places.get(links[0].decision.previous)
        if anchor is None:
            return None
        log = self._log_at(anchor)
        before, digest = self.chain[anchor].decision, self._digests[anchor]
        for link in links:
            view = read_view(link.decision)
            check_link(before, digest, link, view.without)
            check_branch(before, link.decision, view)
            log = _extended(log, view)
            _check_members(view, log)
            before, digest = link.decision, link.decision.digest
        if before.branch != self.decided.branch:
            self._check_declarers(links)
            signers = frozenset().union(*(link.signers for link in links)) - self.removed
            self._check_endorsed(anchor, signers | frozenset(agreeing), absent)
        elif anchor != len(self.chain) - 1:
            raise TrustError("it belongs to another history of this cluster")
        return FollowedChain(anchor + 1, tuple(links), log)

    def _first(self, message: DecisionMessage) -> FollowedChain | None:
        """Return the first decisions of a node that was just paired. It trusts the log of its pairing."""
        log = self.log
        for index, data in enumerate(message.log, message.log_from):
            if index == len(log.entries):
                log = log.extended(decode_entry(data))
        before = None
        for link in message.links:
            view = read_view(link.decision)
            if before is not None:
                check_link(before, before.digest, link, view.without)
            for index, data in enumerate(view.entries, view.log_from):
                if index == len(log.entries):
                    log = log.extended(decode_entry(data))
            before = link.decision
        newest = read_view(message.links[-1].decision)
        if newest.log_length != len(log.entries):
            return None
        _check_members(newest, log)
        return FollowedChain(0, message.links, log)

    def _log_at(self, place: int) -> TrustLog:
        """Return the trust log as it was after a decision of the chain."""
        if place == len(self.chain) - 1:
            return self.log
        length = read_view(self.chain[place].decision).log_length
        return TrustLog.read(self.log.entries[:length]).barring(map(NodeId, self.removed))

    def _check_declarers(self, links: Sequence[CertifiedDecision]) -> None:
        for link in links:
            declaration = read_view(link.decision).declaration
            if declaration is not None and declaration.node in self.removed:
                raise TrustError(f"{NodeId(declaration.node).short}, which was removed, opened that branch")

    def _check_endorsed(self, anchor: int, agreeing: Collection[bytes], absent: Collection[bytes]) -> None:
        """Raise TrustError unless a quorum of each decision that a branch drops agrees to it.

        The word of a person that voters are gone holds for the decisions before it.
        """
        declared = set(absent)
        for link in reversed(self.chain[anchor:]):
            voters = link.decision.voters
            if voters and not is_quorum(voters, agreeing, declared):
                missing = [node for node in voters if node not in agreeing and node not in declared]
                names = ", ".join(NodeId(node).short for node in missing)
                raise TrustError(
                    f"a person continued the cluster elsewhere, without {names}. This machine follows when "
                    "more of the machines that it knows do, or when you confirm it here: "
                    f"barnraise continue --without {' '.join(NodeId(node).short for node in missing)}"
                )
            declared |= set(read_view(link.decision).without)

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

    def locator(self) -> tuple[bytes, ...]:
        """Return digests of this chain, newest first with growing gaps, to find what another has more."""
        if not self.decided.number:
            return ()
        newest = len(self.chain) - 1
        places = [newest, *(newest - (1 << step) for step in range(13))]
        return tuple(self._digests[place] for place in places if place >= 0)

    def catch_up_message(self, have: Iterable[bytes], log_length: int) -> DecisionMessage:
        """Return what a node lacks that has these decisions and a trust log of ``log_length`` entries.

        A node without any decision gets the newest ones and the rest of the trust log.
        """
        have = tuple(have)
        if not have:
            missing = self.log.entries[log_length : log_length + _LOG_AT_ONCE]
            links = _bounded(self.chain[::-1])[::-1]
            return DecisionMessage(links, log_length, tuple(encode_entry(entry) for entry in missing))
        known = next((self._places[digest] for digest in have if digest in self._places), None)
        newer = self.chain[known + 1 :] if known is not None else ()
        return DecisionMessage(_bounded(newer) or self.chain[-1:])

    def _set_view(self, view: MembershipView) -> None:
        self.view = view
        self.members = {member.node: member for member in view.members}

    def _set_log(self, log: TrustLog) -> None:
        self.log = log.barring(map(NodeId, self.removed)) if self.removed else log
        self._roles: dict[bytes, str] = {node.raw: member.role for node, member in self.log.members.items()}

    def _set_chain(self, chain: tuple[CertifiedDecision, ...], digests: tuple[bytes, ...]) -> None:
        self.chain, self._digests = chain[-MOST_LINKS:], digests[-MOST_LINKS:]
        self._places = {digest: place for place, digest in enumerate(self._digests)}


def _extended(log: TrustLog, view: MembershipView) -> TrustLog:
    """Return the log as this view extends it."""
    if view.log_from != len(log.entries):
        raise TrustError(
            f"a decision continues a trust log of {view.log_from} entries, not {len(log.entries)}"
        )
    for data in view.entries:
        log = log.extended(decode_entry(data))
    return log


def _check_members(view: MembershipView, log: TrustLog) -> None:
    for member in view.members:
        role = log.listed_role(NodeId(member.node))
        if role is None or (member.votes and role != "owner"):
            raise TrustError(f"{NodeId(member.node).short} may not be in it")


def _common_length(old: TrustLog, new: TrustLog) -> int:
    common = 0
    for before, after in zip(old.entries, new.entries, strict=False):
        if before is not after and before != after:
            break
        common += 1
    return common


def _bounded(links: Sequence[CertifiedDecision]) -> tuple[CertifiedDecision, ...]:
    """Return the first links that fit in one message, at least one if there is any."""
    size = 0
    for count, link in enumerate(links):
        decision = link.decision
        size += 200 + len(decision.payload) + 34 * len(decision.voters) + 102 * len(link.signers)
        if size > _BYTES_AT_ONCE and count:
            return tuple(links[:count])
    return tuple(links)
