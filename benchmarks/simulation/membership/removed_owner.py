"""Random schedules of a removed owner that attacks the cluster: a removal is final.

    python -m benchmarks.simulation.membership.removed_owner --count 10000          # what the checks run
    python -m benchmarks.simulation.membership.removed_owner --seed 4711 --verbose  # replay one

Some machines sleep while the others remove an owner's machine. That machine keeps its key, its trust log and
every message that it ever saw. It reaches each machine that wakes up before the others do. It replays, forges
decisions, certificates, branches and trust logs, asks for votes, and admits a second machine of its own.

It must never get a role at a machine that knows the removal, and its second machine must get none anywhere.
No machine may take its orders. One case is granted: together with the machines that slept, it is a quorum of
the last view that they know. Afterwards the honest machines must agree.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeKey
from barnraise.identity.trust import TrustLog, encode_entry
from barnraise.membership.consensus.certificate import (
    CertifiedDecision,
    DecisionCertificate,
    SignedVote,
    vote_text,
)
from barnraise.membership.consensus.paxos import (
    PaxosAccept,
    PaxosAccepted,
    PaxosBallot,
    PaxosDecision,
    PaxosPrepare,
    new_branch,
)
from barnraise.membership.consensus.quorum import is_quorum
from barnraise.membership.effects import Effect, SendMessage, ViewChanged
from barnraise.membership.messages import (
    CatchUpRequest,
    DecisionMessage,
    Goodbye,
    Heartbeat,
    Message,
    TrustProposal,
)
from barnraise.membership.view import (
    BranchDeclaration,
    MembershipView,
    PresentMember,
    decide,
    declaration_text,
)
from benchmarks.simulation.membership.cluster import Cluster, Node, Violation, keys

_SECOND = 39  # index of the key of the attacker's second machine
_KEPT_MESSAGES = 400


class Outcome(NamedTuple):
    """One schedule: what went wrong, if anything, and what the attacker could try."""

    seed: int
    fault: str | None
    moves: int
    granted: bool


class _Taped(Cluster):
    """Cluster in which the attacker keeps all that it sends and receives, and speaks for itself."""

    def __init__(self, seed: int, count: int) -> None:
        self.attacker = -1
        self.hostile = self.granted = False
        self.asleep: set[int] = set()
        self.tape: list[Message] = []
        self.votes: dict[PaxosBallot, dict[bytes, bytes]] = {}
        super().__init__(seed, count)

    def _send(self, node: Node, effect: SendMessage) -> None:
        if effect.to not in self.by_raw:
            return  # the attacker's second machine
        if self.hostile and self.by_raw[effect.to].index == self.attacker:
            if isinstance(effect.message, PaxosAccepted):
                self.votes.setdefault(effect.message.ballot, {})[node.raw] = effect.message.signature
            return
        super()._send(node, effect)

    def _do(self, node: Node, event: Callable[..., list[Effect]], *arguments: object) -> None:
        if node.index not in self.asleep:  # links of a machine that sleeps are lost, with all messages
            super()._do(node, event, *arguments)

    def wake(self, node: Node) -> None:
        """Start a machine again, or end its sleep. Its links are new."""
        if node.index in self.asleep:
            self.asleep.discard(node.index)
            for other in self.nodes:
                if other is not node and other.member is not None:
                    self.link(node, other)
        else:
            self.start(node)

    def _changed(self, node: Node, effect: ViewChanged) -> None:
        if self.granted:
            self.decided.clear()  # a machine that the attacker commands may have another history
        super()._changed(node, effect)

    def _arrive(self, node: Node, other: Node, effect: SendMessage) -> None:
        if self.attacker in (node.index, other.index) and len(self.tape) < _KEPT_MESSAGES:
            self.tape.append(effect.message)
        super()._arrive(node, other, effect)


class _Attacker:
    """Removed owner with its key, its old state, and all messages it saw."""

    def __init__(self, cluster: _Taped, node: Node, rng: random.Random) -> None:
        assert node.member is not None
        self.cluster, self.node, self.rng = cluster, node, rng
        self.key, self.second = keys(len(cluster.nodes))[node.index], keys(40)[_SECOND]
        self.log: TrustLog = node.member.log
        self.chain = node.member.history.chain
        self.me: PresentMember = node.member.me
        self.serial = 1_000_000
        self.round = 1000
        self.proposed: list[tuple[PaxosBallot, PaxosDecision]] = []
        self.moves = 0

    def act(self, target: Node) -> None:
        """Make one random move against one machine."""
        moves = [
            self._beat,
            self._beat,
            self._replay,
            self._forge_next,
            self._forge_branch,
            self._forge_branch,
            self._ask,
            self._use_votes,
            self._admit,
            self._first_contact,
            self._say_goodbye,
        ]
        for message in self.rng.choice(moves)(target):
            self.moves += 1
            if target.member is not None:
                self.cluster.perform(target, target.member.receive, self.node.raw, message)

    def _known(self, target: Node) -> CertifiedDecision:
        """Return a decision after which to forge: mostly the newest one of the target."""
        if self.rng.random() < 0.6 and target.member is not None:
            return target.member.history.chain[-1]  # heartbeats tell its digest, and old messages the rest
        return self.rng.choice(self.chain)

    def _beat(self, target: Node) -> list[Message]:
        assert target.member is not None
        self.serial += 1
        record = target.member.record
        log = target.member.log
        honest = self.rng.random() < 0.5
        branch = record.decided.branch if honest else new_branch(record.decided, self.rng.getrandbits(16))
        return [
            Heartbeat(
                me=self.me,
                serial=self.serial,
                echo=0,
                held_us=0,
                branch=branch,
                number=record.decided.number + (0 if honest else self.rng.randrange(3)),
                view=record.digest,
                log_length=len(log.entries),
                log_head=log.head,
                suspects=tuple(node.raw for node in self.cluster.nodes if node not in (target, self.node)),
            )
        ]

    def _replay(self, target: Node) -> list[Message]:
        return self.rng.choices(self.cluster.tape, k=3) if self.cluster.tape else []

    def _view(self, target: Node, log_from: int, entries: tuple[bytes, ...]) -> MembershipView:
        members = [self.me]
        if self.rng.random() < 0.7 and target.member is not None:
            members.append(target.member.me)
        if entries and self.rng.random() < 0.8:
            members.append(PresentMember(self.second.id.raw, bytes(16)))
        self.rng.shuffle(members)
        return MembershipView(tuple(members), log_from, entries, why="all is well")

    def _entries(self, log: TrustLog) -> tuple[bytes, ...]:
        if self.rng.random() < 0.3:
            return ()
        try:
            return (encode_entry(log.admit(self.key, self.second.id, "owner", "second")),)
        except BarnraiseError:
            return ()

    def _certificate(self, decision: PaxosDecision, *extra: NodeKey) -> DecisionCertificate:
        """Sign with all keys that the attacker has, and copy signatures that it saw."""
        self.round += 1
        ballot = PaxosBallot(self.round, self.key.id.raw)
        text = vote_text(decision.digest, ballot)
        votes = [SignedVote(key.id.raw, key.sign(text)) for key in (self.key, *extra)]
        if self.rng.random() < 0.5:
            for message in self.cluster.tape:
                if isinstance(message, DecisionMessage):
                    for link in message.links:
                        if link.certificate is not None:
                            votes += [v for v in link.certificate.votes if v.node != self.key.id.raw]
        unique = {vote.node: vote for vote in votes}
        return DecisionCertificate(ballot, tuple(unique.values()))

    def _forge_next(self, target: Node) -> list[Message]:
        """Announce a decision of the same branch that only the attacker signed."""
        assert target.member is not None
        last = self._known(target).decision
        log = target.member.log
        view = self._view(target, len(log.entries), self._entries(log))
        decision = decide(last, last.digest, view)
        if self.rng.random() < 0.5:
            decision = msgspec.structs.replace(decision, number=decision.number + self.rng.randrange(4))
        links = [CertifiedDecision(decision, self._certificate(decision))]
        return [DecisionMessage((*links,), 0, tuple(map(encode_entry, log.entries)))]

    def _branch(self, target: Node) -> PaxosDecision:
        assert target.member is not None
        last = self._known(target).decision
        log = target.member.log if self.rng.random() < 0.7 else self.log
        view = self._view(target, len(log.entries), self._entries(log))
        absent = tuple(
            sorted(raw for raw in last.voters if raw not in (self.key.id.raw, target.raw))
        ) or tuple(node.raw for node in self.cluster.nodes if node not in (target, self.node))
        view = msgspec.structs.replace(view, without=absent)
        if self.rng.random() < 0.9:
            text = declaration_text(last.digest, absent)
            declaration = BranchDeclaration(self.key.id.raw, self.key.sign(text))
            view = msgspec.structs.replace(view, declaration=declaration)
        return decide(last, last.digest, view, self.rng.getrandbits(32))

    def _forge_branch(self, target: Node) -> list[Message]:
        """Announce a branch, as if a person at the attacker's machine had declared the others gone."""
        decision = self._branch(target)
        links = [CertifiedDecision(decision, self._certificate(decision))]
        if self.rng.random() < 0.5:  # and continue it, also with the second machine's vote
            view = MembershipView((self.me,), 0, ())
            more = decide(decision, decision.digest, view)
            links.append(CertifiedDecision(more, self._certificate(more, self.second)))
        return [DecisionMessage((*links,), 0, tuple(map(encode_entry, self.log.entries)))]

    def _ask(self, target: Node) -> list[Message]:
        """Ask for a promise and a vote, for a plain decision or for a branch."""
        assert target.member is not None
        self.round += 1
        ballot = PaxosBallot(self.round, self.key.id.raw)
        record, log = target.member.record, target.member.log
        if self.rng.random() < 0.5:
            decision = self._branch(target)
        else:
            view = self._view(target, len(log.entries), self._entries(log))
            decision = decide(record.decided, record.digest, view)
        self.proposed.append((ballot, decision))
        return [PaxosPrepare(decision.previous, ballot), PaxosAccept(ballot, decision)]

    def _use_votes(self, target: Node) -> list[Message]:
        """Announce a decision with the votes that honest machines gave to the attacker."""
        messages: list[Message] = []
        for ballot, decision in self.proposed[-20:]:
            given = self.cluster.votes.get(ballot, {})
            votes = [SignedVote(node, signature) for node, signature in given.items()]
            votes.append(SignedVote(self.key.id.raw, self.key.sign(vote_text(decision.digest, ballot))))
            link = CertifiedDecision(decision, DecisionCertificate(ballot, tuple(votes)))
            messages.append(DecisionMessage((link,)))
        return messages

    def _admit(self, target: Node) -> list[Message]:
        assert target.member is not None
        entries = self._entries(target.member.log)
        return [TrustProposal(entry) for entry in entries]

    def _first_contact(self, target: Node) -> list[Message]:
        """Send a longer trust log, as to a machine that was just paired."""
        assert target.member is not None
        log = target.member.log
        entries = self._entries(log)
        link = target.member.history.chain[-1]
        return [
            DecisionMessage((link,), len(log.entries), entries),
            CatchUpRequest(0),
            CatchUpRequest(0, (link.decision.digest,)),
        ]

    def _say_goodbye(self, target: Node) -> list[Message]:
        view = target.member.view if target.member is not None else MembershipView((), 0, ())
        return [Goodbye(member.incarnation) for member in view.members]


def run_schedule(seed: int, *, verbose: bool = False) -> Outcome:
    """Run one schedule, which is a function of the seed alone."""
    rng = random.Random(seed)
    cluster = _Taped(seed, rng.choice((3, 4, 5, 5, 6)))
    schedule = _Schedule(cluster, rng)
    try:
        fault = schedule.run()
    except Violation as violation:
        fault = str(violation)
    if verbose:
        for now, index, position, why in cluster.history:
            print(f"{now:9.3f}  node {index}  view {position[0]}/{position[1]}  {why}")
        for now, index, text in cluster.notes:
            print(f"{now:9.3f}  node {index}  {text}")
    return Outcome(seed, fault, schedule.attacker.moves if schedule.attacker else 0, cluster.granted)


class _Schedule:
    """One schedule: a removal while machines sleep, the attack while they wake, and the agreement."""

    def __init__(self, cluster: _Taped, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.out = rng.choice(cluster.nodes)
        cluster.attacker = self.out.index
        self.knows: set[int] = set()
        self.attacker: _Attacker | None = None

    def run(self) -> str | None:
        """Run it and return the fault or None."""
        cluster, rng = self.cluster, self.rng
        honest = [node for node in cluster.nodes if node is not self.out]
        cluster.run(rng.uniform(0.5, 1.0))
        self._history(honest)
        sleepers = self._sleep(honest)
        awake = [node for node in honest if node not in sleepers]
        if not self._remove(awake):
            return None  # without a quorum nothing was removed
        attacker = self.attacker = _Attacker(cluster, self.out, rng)
        cluster.hostile = True
        cluster.crash(self.out, refuses=False)
        self._grant(sleepers)
        cluster.on_changed = lambda node: self._check(attacker)
        self._attack(attacker, awake, sleepers)
        return self._agree(attacker, honest)

    def _history(self, honest: list[Node]) -> None:
        """Let some nodes come and go, so that the chain has more than one view."""
        if self.rng.random() < 0.4:
            node = self.rng.choice(self.cluster.nodes)
            self.cluster.crash(node, refuses=False)
            self.cluster.run(self.rng.uniform(3.0, 4.0))
            self.cluster.start(node)
            self.cluster.run(self.rng.uniform(1.0, 2.0))

    def _sleep(self, honest: list[Node]) -> list[Node]:
        count = 2 if len(honest) > 4 and self.rng.random() < 0.5 else 1
        sleepers = self.rng.sample(honest, count)
        for node in sleepers:
            if self.rng.random() < 0.5:
                self.cluster.crash(node, refuses=False)
            else:
                self.cluster.asleep.add(node.index)
            if self.rng.random() < 0.5:
                self.cluster.run(self.rng.uniform(0.0, 3.0))
        return sleepers

    def _remove(self, awake: list[Node]) -> bool:
        """Let an awake machine remove the attacker; return False if no quorum is left for it."""
        cluster, out = self.cluster, self.out
        cluster.run(self.rng.uniform(3.0, 5.0))
        remover = self.rng.choice(awake)
        for _ in range(10):
            member = remover.member
            assert member is not None
            if member.log.role(keys(40)[0].id) is None and remover.raw not in member.view.nodes:
                return False
            index = remover.index
            key, victim = keys(len(cluster.nodes))[index], keys(len(cluster.nodes))[out.index].id
            if member.log.role(victim) is None:
                break
            cluster.wish(remover, encode_entry(member.log.revoke(key, victim)))
            cluster.run(1.0)
        assert remover.member is not None
        if remover.member.log.role(keys(len(cluster.nodes))[out.index].id) is not None:
            return False
        cluster.run(1.0)
        return True

    def _grant(self, sleepers: list[Node]) -> None:
        """Note whether the attacker and the sleepers are a quorum of a view that a sleeper knows."""
        group = {self.out.raw, *(node.raw for node in sleepers)}
        for node in sleepers:
            for link in node.disk.chain[-1:]:
                if is_quorum(link.decision.voters, group):
                    self.cluster.granted = True

    def _attack(self, attacker: _Attacker, awake: list[Node], sleepers: list[Node]) -> None:
        cluster, rng = self.cluster, self.rng
        sides = [[node.index for node in awake], [node.index for node in sleepers]]
        if rng.random() < 0.8:
            cluster.split(*sides)
        for node in sleepers:
            cluster.wake(node)
            for _ in range(rng.randrange(3, 25)):
                attacker.act(node)
                if rng.random() < 0.3:
                    cluster.run(rng.expovariate(1 / 0.2))
                self._check(attacker)
        end = cluster.now + rng.uniform(1.0, 4.0)
        while cluster.now < end:
            attacker.act(rng.choice([*awake, *sleepers, *sleepers]))
            self._check(attacker)
            cluster.run(rng.expovariate(1 / 0.1))
            if rng.random() < 0.03:
                cluster.heal()
                _reconnect(cluster)

    def _agree(self, attacker: _Attacker, honest: list[Node]) -> str | None:
        """Restore the network, with the attacker still at work, and wait for the honest machines."""
        cluster = self.cluster
        cluster.heal()
        for node in honest:
            cluster.wake(node)
        _reconnect(cluster)
        begin = cluster.now
        while cluster.now < begin + (5.0 if cluster.granted else 40.0):
            if self.rng.random() < 0.5:
                attacker.act(self.rng.choice(honest))
            cluster.run(0.25)
            self._check(attacker)
            if cluster.agreed():
                return None
        if self.cluster.granted:
            return None  # a machine that the attacker commanded may have another history
        return "the honest machines do not agree after everything had healed"

    def _check(self, attacker: _Attacker) -> None:
        victim, second = attacker.key.id, attacker.second.id
        for node in self.cluster.nodes:
            member = node.member
            if member is None or node is self.out or node.index in self.cluster.asleep:
                continue
            if member.log.role(victim) is None:
                self.knows.add(node.index)
            elif node.index in self.knows:
                raise Violation(f"seed {self.cluster.seed}: node {node.index} takes the removed owner back")
            if self.cluster.granted and node.index not in self.knows:
                continue
            if member.log.role(second) is not None:
                raise Violation(f"seed {self.cluster.seed}: node {node.index} admits the second machine")
            if member.log.role(victim) == "owner" and member.is_current(self.cluster.now):
                raise Violation(
                    f"seed {self.cluster.seed}: node {node.index} takes the removed owner's orders"
                )


def _reconnect(cluster: Cluster) -> None:
    live = [node for node in cluster.nodes if node.member is not None]
    for node in live:
        for other in live:
            if node.index < other.index:
                cluster.link(node, other)


def run_many(seeds: Sequence[int]) -> list[Outcome]:
    """Run the schedules of these seeds on all cores."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        return pool.map(run_schedule, seeds, chunksize=50)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run one schedule only")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.seed is not None:
        outcome = run_schedule(options.seed, verbose=options.verbose)
        print(outcome)
        return outcome.fault is not None
    begin = time.monotonic()
    outcomes = run_many(range(options.first, options.first + options.count))
    faults = [outcome for outcome in outcomes if outcome.fault is not None]
    for outcome in faults[:20]:
        print(
            "python -m benchmarks.simulation.membership.removed_owner --verbose "
            f"--seed {outcome.seed}   # {outcome.fault}"
        )
    figures = {
        "sim_schedules": len(outcomes),
        "sim_violations": len(faults),
        "sim_attacked": sum(outcome.moves > 0 for outcome in outcomes),
        "sim_granted": sum(outcome.granted for outcome in outcomes),
        "sim_moves": sum(outcome.moves for outcome in outcomes),
        "seconds": round(time.monotonic() - begin, 1),
    }
    print(json.dumps(figures))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
