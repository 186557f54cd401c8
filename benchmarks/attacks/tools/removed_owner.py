"""Attacks by an owner's machine that was removed, on a machine that slept meanwhile.

Run by ``benchmarks.attacks.tools``. The attacker keeps its key and its trust log. The machine that slept
still trusts both.
"""

from __future__ import annotations

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
from barnraise.membership.messages import DecisionMessage, Message, TrustProposal
from barnraise.membership.view import (
    BranchDeclaration,
    MembershipView,
    PresentMember,
    decide,
    declaration_text,
)
from barnraise.runs.record import sign_spec
from benchmarks.attacks.tools.guest import Agents
from benchmarks.attacks.tools.run_member import RunMember
from benchmarks.attacks.tools.runs import run_spec
from benchmarks.attacks.tools.toolbox import Result, tool

_ROUNDS = 10


class RemovedOwner(RunMember):
    """Removed machine that still votes and decides."""

    @property
    def me(self) -> PresentMember:
        return PresentMember(self.key.id.raw, self.incarnation, votes=True)

    def certified(self, decision: PaxosDecision) -> CertifiedDecision:
        """Sign a decision as if one vote were a quorum."""
        ballot = PaxosBallot(1000, self.key.id.raw)
        vote = SignedVote(self.key.id.raw, self.key.sign(vote_text(decision.digest, ballot)))
        return CertifiedDecision(decision, DecisionCertificate(ballot, (vote,)))

    def forgeries(self, node: NodeId, second: NodeId) -> list[Message]:
        """Return messages that would make the attacker and a second machine owners again."""
        heard = self.heard[node]
        last = PaxosDecision(heard.branch, heard.number, bytes(32), (), b"")
        admission = encode_entry(self.log.admit(self.key, second, "owner", "second"))
        entries = (admission,)
        plain = MembershipView((self.me,), len(self.log), entries, why="all is well")
        absent = tuple(sorted(other.raw for other in self.log.owners if other != self.key.id))
        declaration = BranchDeclaration(self.key.id.raw, self.key.sign(declaration_text(heard.view, absent)))
        declared = msgspec.structs.replace(plain, without=absent, declaration=declaration)
        log = tuple(map(encode_entry, self.log.entries))
        forged: list[Message] = [TrustProposal(admission)]
        for view in (plain, declared):
            decision = decide(last, heard.view, view, 7)
            ballot = PaxosBallot(1000, self.key.id.raw)
            forged += [
                PaxosPrepare(heard.view, ballot),
                PaxosAccept(ballot, decision),
                DecisionMessage((self.certified(decision),), 0, (*log, admission)),
                DecisionMessage((CertifiedDecision(decision),), 0, (*log, admission)),
            ]
        return forged


@tool
async def return_as_owner(keep: str, agents: Agents, canary: str) -> Result:
    """Send forged decisions, branches and a trust log, and an order, to each of these agents."""
    attacker = RemovedOwner(keep, agents)
    second = NodeKey.generate().id
    for _ in range(100):
        await attacker.live(0.1, 0.1)
        if len(attacker.heard) == len(attacker.agents):
            break
    await attacker.come()
    order = sign_spec(run_spec(attacker, "mallory", canary), attacker.key)
    for _ in range(_ROUNDS):
        for node in attacker.agents:
            forged = attacker.forgeries(node, second)
            await attacker.say(node, map(protocol.encode_membership, forged))
        await attacker.tell(messages.encode(RecordUpdate(order)))
        await attacker.live(0.5)
    reached = len(attacker.heard)
    await attacker.leave()
    return {"reached": reached, "second": second.raw.hex()}
