"""Membership node: a state machine without clock, network or disk.

Every method takes the time and returns effects to perform in order. The coordinator, the most senior voter
that is not dead, proposes the next view. `consensus` decides.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import msgspec

from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog, encode_entry
from barnraise.membership import failure_detector
from barnraise.membership.consensus import paxos
from barnraise.membership.consensus.certificate import (
    CertifiedDecision,
    DecisionCertificate,
    SignedVote,
    is_vote_signed,
    vote_text,
)
from barnraise.membership.consensus.paxos import (
    AcceptorState,
    PaxosAccept,
    PaxosAccepted,
    PaxosBallot,
    PaxosPrepare,
    PaxosPromise,
    PaxosProposal,
    PaxosReject,
)
from barnraise.membership.consensus.quorum import QuorumStatus, is_quorum, quorum_status
from barnraise.membership.effects import Effect, LogNote, SendMessage, ViewChanged
from barnraise.membership.election import ElectedCoordinator, elect_coordinator
from barnraise.membership.heartbeat import HeartbeatSender
from barnraise.membership.history import FollowedChain, History, StoredHistory
from barnraise.membership.messages import (
    CatchUpRequest,
    DecisionMessage,
    Goodbye,
    Heartbeat,
    Message,
    TrustProposal,
)
from barnraise.membership.peer_table import PeerTable
from barnraise.membership.peers import PeerState
from barnraise.membership.pending_proposals import PendingProposals
from barnraise.membership.view import (
    BranchDeclaration,
    MembershipView,
    PresentMember,
    WantedChange,
    decide,
    declaration_text,
    next_view,
)

TICK_S = failure_detector.HEARTBEAT_S / 2
_ASLEEP_S = 1.0
_ATTEMPT_S = 1.0
_GATHER_S = 0.15
_TELL_AGAIN_S = 0.5
_MOST_WARNED = 256


class MembershipNode:
    """State of one node about the cluster's views: its beliefs, promises and proposals."""

    def __init__(
        self, me: PresentMember, key: NodeKey, stored: StoredHistory, rng: random.Random, now: float
    ) -> None:
        self.me = me
        self._key = key
        self.history = History(stored)
        self._peer_table = PeerTable(me.node, self.history, now)
        self.leaving = False
        self._rng = rng
        self._heartbeats = HeartbeatSender(now)
        self._last_tick = now
        self._proposal: PaxosProposal | None = None
        self._deadline = now
        self._not_before = now
        self._collecting_since: float | None = None
        self._round = 0
        self._proposals = PendingProposals()
        self._absent: frozenset[bytes] = frozenset()
        self._suspects: frozenset[bytes] = frozenset()
        self._warned: set[tuple[bytes, str]] = set()
        self._effects: list[Effect] = []

    @property
    def view(self) -> MembershipView:
        return self.history.view

    @property
    def peers(self) -> Mapping[bytes, PeerState]:
        return self._peer_table.peers

    @property
    def record(self) -> AcceptorState:
        return self.history.record

    @property
    def log(self) -> TrustLog:
        return self.history.log

    @property
    def is_member(self) -> bool:
        """Return True if this incarnation is in the view."""
        member = self.history.member(self.me.node)
        return member is not None and member.incarnation == self.me.incarnation

    def dead(self, now: float) -> frozenset[bytes]:
        """Return the members that are judged dead."""
        return self._peer_table.dead(self._watched_until(now))

    def coordinator(self, now: float) -> ElectedCoordinator:
        """Return the member that should propose the next view."""
        return elect_coordinator(self.view, self.dead(now) | self._leaving_nodes() | self._absent)

    def quorum_status(self, now: float) -> QuorumStatus:
        """Return whether the reachable voters can decide."""
        return quorum_status(self.view.voters, self.dead(now) | self.unreachable(now))

    def unreachable(self, now: float) -> frozenset[bytes]:
        """Return the members that this node does not hear now, whether they are dead or not."""
        return self._peer_table.unreachable(self._watched_until(now))

    def _watched_until(self, now: float) -> float:
        """Return until when this node has watched the others: at most one tick after the last one.

        A question may come after this machine stood still, and before the tick that notices it. The others
        were not silent in that time: nothing listened.
        """
        return min(now, max(self._last_tick, self._peer_table.woke_at) + TICK_S)

    def is_current(self, now: float) -> bool:
        """Return True if a quorum confirms this node's view now. Only then it takes orders of others.

        A node that slept may not know which machines were removed meanwhile. Machines that are too many to
        watch count if they have a link, as long as no heartbeat shows a newer decision.
        """
        decided = self.history.decided
        if not self.is_member or self._peer_table.has_newer_decision(decided.branch, decided.number, now):
            return False
        confirming = {self.me.node}
        for node in self._peer_table.others():
            beat = self._peer_table.fresh_beat(node, now)
            if beat is not None:
                is_confirming = beat.view == self.record.digest
            else:
                far = node not in self._peer_table.watching
                is_confirming = far and self._peer_table.peer(node, now).linked
            if is_confirming:
                confirming.add(node)
        return is_quorum(self.view.voters, confirming)

    # events

    def tick(self, now: float) -> list[Effect]:
        """Advance the time; call every TICK_S. A late call means that this machine was asleep."""
        self._notice_sleep(now)
        self._last_tick = now
        suspects = self._peer_table.silent(now)
        if now >= self._heartbeats.next_at or suspects != self._suspects:
            self._suspects = suspects
            self._send_heartbeats(now)
        self._repeat_removals(now)
        self._resend_proposals(now)
        self._propose_if_needed(now)
        return self._take_effects()

    def _notice_sleep(self, now: float) -> None:
        slept_s = now - max(self._last_tick, self._peer_table.woke_at)
        if slept_s > _ASLEEP_S:
            self._peer_table.woke_up(now)
            self._note(f"this machine was asleep or stopped for {slept_s:.1f} s")

    def receive(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """Handle a message from a node whose link has proved its identity."""
        role = self.history.role(sender)
        if role is None or sender == self.me.node:
            return []
        self._notice_sleep(now)
        match message:
            case Heartbeat():
                if message.me.node == sender:
                    self._on_heartbeat(sender, message, now)
            case Goodbye():
                self._peer_table.peer(sender, now).leaving = message.incarnation
                self._propose_if_needed(now)
            case CatchUpRequest():
                if now - self._peer_table.peer(sender, now).decision_sent_at >= _TELL_AGAIN_S / 10:
                    self._send_links(sender, message.have, message.log_length, now)
            case _ if role != "owner":
                if (sender, "guest") not in self._warned:
                    self._warned.add((sender, "guest"))
                    self._note(f"{_short(sender)} is a guest and cannot vote: its message is ignored")
            case DecisionMessage():
                self._on_decided(sender, message, now)
            case TrustProposal():
                self._proposals.add(message.entry, self.history, now)
                self._propose_if_needed(now)
            case PaxosPrepare() | PaxosAccept():
                self._on_question(sender, message, now)
            case PaxosPromise() | PaxosAccepted() | PaxosReject():
                self._on_reply(sender, message, now)
        return self._take_effects()

    def link_up(self, node: bytes, now: float) -> list[Effect]:
        """Send a heartbeat at once over a new link, instead of at the next interval."""
        self._peer_table.peer(node, now).linked = True
        if self.history.role(node) is not None:
            self._effects.append(
                SendMessage(node, self._heartbeat_for(node, self._peer_table.visitors(now), now))
            )
        return self._take_effects()

    def link_down(self, node: bytes) -> None:
        """Note that the link is gone. This alone does not mean death."""
        if node in self.peers:
            self.peers[node].linked = False

    def connection_refused(self, node: bytes, now: float) -> list[Effect]:
        """Note that the machine rejected a connection, so its agent has ended."""
        peer = self._peer_table.peer(node, now)
        if not peer.gone:
            peer.gone = True
            return self.tick(now)
        return self._take_effects()

    def propose_entry(self, entry: bytes, now: float) -> list[Effect]:
        """Propose an entry of the trust log. The log shows later whether it was decided."""
        self._proposals.add(entry, self.history, now)
        self._resend_proposals(now, at_once=True)
        self._propose_if_needed(now)
        return self._take_effects()

    def leave(self, now: float) -> list[Effect]:
        """Announce a goodbye, so that the next view is without this node."""
        self.leaving = True
        self._send_heartbeats(now)
        word = Goodbye(self.me.incarnation)
        self._effects += [SendMessage(node, word) for node in self._peer_table.others()]
        return self._take_effects()

    def cancel_leave(self, now: float) -> list[Effect]:
        """Withdraw the goodbye after sleep."""
        self.leaving = False
        self._peer_table.woke_up(now)
        self._send_heartbeats(now)
        return self._take_effects()

    def continue_without(self, absent: Iterable[bytes], now: float) -> list[Effect]:
        """Open a new branch without these voters, which the user has declared gone.

        An empty set withdraws the declaration.
        """
        self._absent = frozenset(absent) & frozenset(self.view.voters) - {self.me.node}
        self._proposal = None
        self._propose_if_needed(now)
        return self._take_effects()

    # beats

    def _send_heartbeats(self, now: float) -> None:
        self._heartbeats.start_round(now)
        if self._suspects or self.leaving or not self.is_member:
            targets: set[bytes] = {*self.history.members, *self._peer_table.peers}
        else:
            targets = {
                *self._peer_table.watching,
                *(node for node in self._peer_table.peers if node not in self.history.members),
            }
        visitors = self._peer_table.visitors(now)
        for node in sorted(targets - {self.me.node}):
            if self.history.role(node) is not None:
                self._effects.append(SendMessage(node, self._heartbeat_for(node, visitors, now)))

    def _heartbeat_for(self, node: bytes, visitors: tuple[PresentMember, ...], now: float) -> Heartbeat:
        return self._heartbeats.build(
            self.me,
            self.history,
            self._peer_table.peer(node, now),
            now,
            leaving=self.leaving,
            suspects=self._suspects,
            visitors=visitors,
        )

    def _on_heartbeat(self, sender: bytes, beat: Heartbeat, now: float) -> None:
        peer = self._peer_table.peer(sender, now)
        was_new = peer.beat is None or peer.beat.me != beat.me
        peer.heard(beat, now)
        self._heartbeats.measure_echo(peer, beat, now)
        if not beat.leaving and peer.leaving == beat.me.incarnation:
            peer.leaving = None
        if beat.leaving:
            peer.leaving = beat.me.incarnation
        if self._is_forked(sender, beat):
            return
        position = self.record.decided.position
        if peer.position < position and now - peer.decision_sent_at >= _TELL_AGAIN_S:
            self._send_decision(sender, now)
        elif peer.position > position and now - peer.catch_up_sent_at >= _TELL_AGAIN_S:
            self._request_catch_up(sender, now)
        if was_new:
            self._propose_if_needed(now)

    def _is_forked(self, sender: bytes, beat: Heartbeat) -> bool:
        what = self.history.differs_from(beat)
        if what is None:
            self._peer_table.forked.discard(sender)
            return False
        self._peer_table.forked.add(sender)
        if (sender, what) not in self._warned:
            self._warned.add((sender, what))
            self._note(f"{_short(sender)} has another {what} than this machine; it is not followed")
        return True

    # what follows from what is known

    def _propose_if_needed(self, now: float) -> None:
        """Propose the next view if this node is the coordinator and a change is needed."""
        if self.me.node not in self.record.decided.voters:
            self._proposal = None
            return
        dead = self.dead(now)
        first, _ = elect_coordinator(self.view, dead | self._leaving_nodes() | self._absent)
        if (first != self.me.node and not self._absent) or now < self._not_before:
            return
        if self._proposal is not None and now < self._deadline:
            return
        if self._absent and self._peer_table.has_newer_branch(self.record.decided.branch, now):
            return  # the person's word lets this node follow that branch: it need not open another
        entries, barred, rotated = self._proposals.fitting(self.history)
        wanted = WantedChange(
            dead=dead | self._absent,
            leaving=self._leaving_nodes() | barred,
            arrived={self.me.node: self.me, **self._peer_table.arrived(barred, now)},
            entries=entries,
            log_length=len(self.log.entries),
            absent=tuple(sorted(self._absent)),
            rotated=rotated,
        )
        view = next_view(self.view, wanted)
        if view is None:
            self._collecting_since = None
            return
        if not self._is_time(view, now):
            return
        # To be sure of a quorum now and in the view that follows: a senior that has just come back must not
        # give up its place to machines that may never return.
        alive = self._peer_table.alive(now) | {self.me.node}
        alive |= {new for old, new in rotated.items() if old in alive}
        enough = is_quorum(self.view.voters, alive, self._absent)
        if enough and is_quorum(view.voters, alive):
            self._propose(view, now)

    def _is_time(self, view: MembershipView, now: float) -> bool:
        """Return False while arrivals are collected, so that machines started together make one change."""
        if view.entries or view.without or not set(self.view.nodes) <= set(view.nodes):
            return True
        if self._collecting_since is None:
            self._collecting_since = now
        return now - self._collecting_since >= _GATHER_S

    def _resend_proposals(self, now: float, *, at_once: bool = False) -> None:
        entries = self._proposals.due(now, at_once=at_once)
        if not entries:
            return
        first, _ = self.coordinator(now)
        heard = first is not None and first not in self._peer_table.unreachable(now)
        targets = [first] if heard and first is not None else self._peer_table.others()
        for node in targets:
            if node != self.me.node and node not in self._proposals.removals():
                self._effects += [SendMessage(node, TrustProposal(entry)) for entry in entries]

    # agreement

    def _propose(self, view: MembershipView, now: float) -> None:
        promised = self.record.promised
        self._round = max(self._round, promised.round if promised is not None else 0) + 1
        ballot = PaxosBallot(self._round, self.me.node)
        if view.without:
            text = declaration_text(self.record.digest, view.without)
            declaration = BranchDeclaration(self.me.node, self._key.sign(text))
            view = msgspec.structs.replace(view, declaration=declaration)
        wish = decide(self.record.decided, self.record.digest, view, self._rng.getrandbits(32))
        self._proposal = PaxosProposal(self.record, ballot, wish, self._absent)
        self._deadline = now + _ATTEMPT_S
        self._not_before = now
        self._send_to_voters(self._proposal.prepare(), now)

    def _send_to_voters(self, question: PaxosPrepare | PaxosAccept, now: float) -> None:
        others = [SendMessage(node, question) for node in self.view.voters if node != self.me.node]
        self._effects += others
        self._on_question(self.me.node, question, now)

    def _on_question(self, sender: bytes, question: PaxosPrepare | PaxosAccept, now: float) -> None:
        after = question.after if isinstance(question, PaxosPrepare) else question.decision.previous
        if after != self.record.digest:
            peer = self._peer_table.peer(sender, now)
            if now - peer.decision_sent_at >= _TELL_AGAIN_S / 4 and self.history.decided.number:
                self._send_decision(sender, now)
            return
        if isinstance(question, PaxosPrepare):
            answer = paxos.answer_prepare(self.record, self.me.node, question)
        else:
            fault = self.history.fault(question.decision, self.me.node, self._absent)
            if fault is not None:
                self._note_once(
                    sender, f"{_short(sender)} proposes a change that this machine rejects: {fault}"
                )
                return
            answer = paxos.answer_accept(self.record, self.me.node, question, self._sign_vote)
        if answer.record is not None:
            self._effects.append(self.history.record_answer(answer.record))
        if answer.reply is None:
            return
        if sender == self.me.node:
            self._on_reply(sender, answer.reply, now)
        else:
            self._effects.append(SendMessage(sender, answer.reply))

    def _on_reply(self, sender: bytes, reply: PaxosPromise | PaxosAccepted | PaxosReject, now: float) -> None:
        proposal = self._proposal
        if proposal is None or proposal.after != self.record.digest or sender not in proposal.voters:
            return
        if isinstance(reply, PaxosReject):
            if reply.ballot == proposal.ballot:
                self._round = max(self._round, reply.promised.round)
                self._proposal = None
                # Another node proposes, too: a random delay decides which is first.
                self._not_before = now + self._rng.uniform(0.05, 0.4)
            return
        if isinstance(reply, PaxosPromise):
            accept = proposal.promised(sender, reply)
            if accept is not None:
                self._send_to_voters(accept, now)
        elif self._is_signed(sender, reply, proposal) and proposal.accepted(sender, reply):
            before = self.view
            # We accepted it ourselves, so it was checked; else we were asked and found it wanting.
            if self.history.fault(proposal.decision, self.me.node, self._absent) is None:
                votes = tuple(SignedVote(*vote) for vote in sorted(proposal.signatures.items()))
                certificate = DecisionCertificate(proposal.ballot, votes)
                link = CertifiedDecision(proposal.decision, certificate)
                self._adopt(self.history.extended_by(link), now)
                self._broadcast_decision(before, now)

    def _sign_vote(self, digest: bytes, ballot: PaxosBallot) -> bytes:
        return self._key.sign(vote_text(digest, ballot))

    def _is_signed(self, sender: bytes, reply: PaxosAccepted, proposal: PaxosProposal) -> bool:
        text = vote_text(proposal.decision.digest, proposal.ballot)
        return is_vote_signed(SignedVote(sender, reply.signature), text)

    def _on_decided(self, sender: bytes, message: DecisionMessage, now: float) -> None:
        own, received = self.history.decided, message.links[-1].decision
        if received.position <= own.position:
            return
        try:
            agreeing = self._peer_table.on_branch(received.branch, now) | {self.me.node}
            followed = self.history.follow(message, agreeing, self._absent)
        except BarnraiseError as error:
            self._note_once(
                sender, f"this machine does not follow a decision of {_short(sender)}: {error.message}"
            )
            return
        if followed is None:
            if now - self._peer_table.peer(sender, now).catch_up_sent_at >= _TELL_AGAIN_S:
                self._request_catch_up(sender, now)
            return
        if received.branch > own.branch and own.number >= received.number:
            lost = own.number - received.number + 1
            self._note(f"the user continued without this machine: {lost} of its own changes are dropped")
        self._adopt(followed, now)

    def _adopt(self, followed: FollowedChain, now: float) -> None:
        before = self.history.members
        self._effects.append(self.history.adopt(followed))
        self._peer_table.view_changed(now)
        self._proposal, self._collecting_since, self._absent = None, None, frozenset()
        self._proposals.forget(self.view.entries)
        for node in before:
            if node not in self.history.members and node != self.me.node:
                self._peer_table.peer(node, now).evicted(now)
        for node in self._peer_table.others():
            peer = self._peer_table.peer(node, now)
            if node not in before:
                peer.detector.reset_timeout(now)
                peer.gone = False
        self._suspects = self._peer_table.silent(now)
        self._effects.append(ViewChanged(self.view.why))

    def _request_catch_up(self, sender: bytes, now: float) -> None:
        self._peer_table.peer(sender, now).catch_up_sent_at = now
        request = CatchUpRequest(len(self.history.log.entries), self.history.locator())
        self._effects.append(SendMessage(sender, request))

    def _broadcast_decision(self, before: MembershipView, now: float) -> None:
        """Send the decision to every member.

        If this node dies meanwhile, heartbeats show which members lack it.
        """
        for node in dict.fromkeys((*before.nodes, *self.view.nodes)):
            if node != self.me.node and self.history.role(node) is not None:
                self._send_decision(node, now)

    def _send_decision(self, node: bytes, now: float) -> None:
        """Send what a peer lacks, judged by its last heartbeat."""
        beat = self._peer_table.peer(node, now).beat
        have = (beat.view,) if beat is not None and beat.number else ()
        self._send_links(node, have, beat.log_length if beat is not None else 0, now)

    def _send_links(self, node: bytes, have: tuple[bytes, ...], log_length: int, now: float) -> None:
        self._peer_table.peer(node, now).decision_sent_at = now
        self._effects.append(SendMessage(node, self.history.catch_up_message(have, log_length)))

    def _repeat_removals(self, now: float) -> None:
        """Propose to remove machines again that this node knows as removed, on a branch that lists them."""
        if not self.log.readmitted or self.history.role(self.me.node) != "owner":
            return
        pending = self._proposals.removals()
        for node in self.log.readmitted:
            if node.raw not in pending:
                entry = encode_entry(self.log.revoke(self._key, node))
                self._proposals.add(entry, self.history, now)

    def _leaving_nodes(self) -> frozenset[bytes]:
        leavers = self._peer_table.leaving() | self._proposals.removals()
        return leavers | {self.me.node} if self.leaving else leavers

    def _note_once(self, sender: bytes, text: str) -> None:
        if (sender, text) not in self._warned and len(self._warned) < _MOST_WARNED:
            self._warned.add((sender, text))
            self._note(text)

    def _note(self, text: str) -> None:
        self._effects.append(LogNote(text))

    def _take_effects(self) -> list[Effect]:
        out, self._effects = self._effects, []
        return out


def _short(node: bytes) -> str:
    return NodeId(node).short
