"""Tools of a removed owner's machine: it kept its key and its log, and reaches a machine that slept."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from barnraise.agent import protocol
from barnraise.agent.runs import messages
from barnraise.agent.runs.messages import RecordUpdate
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import encode_entry
from barnraise.membership.consensus.certificate import (
    CertifiedDecision,
    DecisionCertificate,
    SignedVote,
    vote_text,
)
from barnraise.membership.consensus.paxos import PaxosAccept, PaxosBallot, PaxosDecision, PaxosPrepare
from barnraise.membership.messages import CatchUpRequest, DecisionMessage, Message, TrustProposal
from barnraise.membership.view import (
    BranchDeclaration,
    MembershipView,
    PresentMember,
    decide,
    declaration_text,
)
from barnraise.runs.record import sign_spec
from barnraise.transport.control.dial import ControlConnection
from benchmarks.attacks.tools.guest import Agents
from benchmarks.attacks.tools.run_member import RunMember
from benchmarks.attacks.tools.runs import make_order
from benchmarks.attacks.tools.toolbox import Result, tool

_ROUND = 1 << 20


class RemovedOwner(RunMember):
    """A removed owner without an agent; it keeps the decisions that it receives."""

    def __init__(self, keep: str, agents: Agents) -> None:
        super().__init__(keep, agents)
        self.decisions: list[CertifiedDecision] = []
        self.second = NodeKey.generate()

    @property
    def me(self) -> PresentMember:
        return PresentMember(self.key.id.raw, self.incarnation, votes=True)

    def _received(self, link: ControlConnection, message: bytes) -> None:
        super()._received(link, message)
        if message[:1] == protocol.MEMBERSHIP:
            decoded = protocol.decode_membership(message[1:])
            if isinstance(decoded, DecisionMessage):
                self.decisions += decoded.links

    def forged(self, node: NodeId) -> Iterator[Message]:
        """Yield decisions, a branch, votes and an admission that only this machine wants."""
        old = tuple(map(encode_entry, self.log.entries))
        admission = encode_entry(self.log.admit(self.key, self.second.id, "owner", "second"))
        yield TrustProposal(admission)
        for link in self.decisions[-1:]:
            last = link.decision
            absent = tuple(sorted(raw for raw in last.voters if raw != node.raw))
            declared = BranchDeclaration(
                self.key.id.raw, self.key.sign(declaration_text(last.digest, absent))
            )
            view = MembershipView(
                (self.me, PresentMember(node.raw, os.urandom(16))), len(old), (admission,), why="all is well"
            )
            branch = msgspec.structs.replace(view, without=absent, declaration=declared)
            following = decide(last, last.digest, view)
            opened = decide(last, last.digest, branch, 7)
            for decision in (following, opened):
                yield DecisionMessage((CertifiedDecision(decision, self._certificate(decision)),), 0, old)
                yield DecisionMessage((link, CertifiedDecision(decision, link.certificate)), 0, old)
                yield PaxosPrepare(last.digest, PaxosBallot(_ROUND, self.key.id.raw))
                yield PaxosAccept(PaxosBallot(_ROUND, self.key.id.raw), decision)

    def _certificate(self, decision: PaxosDecision) -> DecisionCertificate:
        ballot = PaxosBallot(_ROUND, self.key.id.raw)
        text = vote_text(decision.digest, ballot)
        votes = (SignedVote(key.id.raw, key.sign(text)) for key in (self.key, self.second))
        return DecisionCertificate(ballot, tuple(votes))


@tool
async def removed_returns(keep: str, agents: Agents, canary: str, seconds: float) -> Result:
    """Tell a machine that slept another history, admit a second machine, and order a run there."""
    member = RemovedOwner(keep, agents)
    await member.come()
    record = sign_spec(make_order(member, "returned", canary), member.key)
    sent = 0
    for _ in range(int(seconds)):
        for node in member.agents:
            await member.say(node, [protocol.encode_membership(CatchUpRequest(0))])
            await member.live(0.5)
            forged = list(member.forged(node))
            await member.say(node, map(protocol.encode_membership, forged))
            sent += len(forged)
        await member.tell(messages.encode(RecordUpdate(record)))
        await member.live(0.5)
    return {
        "heard": len(member.heard),
        "decisions": len(member.decisions),
        "sent": sent,
        "second": member.second.id.raw.hex(),
    }
