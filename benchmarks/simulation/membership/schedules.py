"""Random schedules of faults for the membership, on a fake clock: never two views under one number.

    python -m benchmarks.simulation.membership.schedules --count 10000          # what the checks run
    python -m benchmarks.simulation.membership.schedules --count 1000000        # the long form, some hours
    python -m benchmarks.simulation.membership.schedules --seed 4711 --verbose  # replay one

Faults of nodes: crashes (also between two effects), restarts, stalls, goodbyes and changes of the trust log.
Faults of the network: cuts in one or both directions, splits, loss, doubling, reordering and delays. Then the
network heals, while some machines stay off in some schedules. A quorum of the remaining nodes must agree.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from barnraise.identity.trust import encode_entry
from barnraise.membership.consensus.quorum import is_quorum
from benchmarks.simulation.membership.cluster import Cluster, Node, Violation, keys

_CHAOS_S = 10.0
_HEALING_S = 60.0


class Outcome(NamedTuple):
    """One schedule: what went wrong, if anything, and how long the healing took."""

    seed: int
    fault: str | None
    views: int
    healing_s: float


def run_schedule(seed: int, *, verbose: bool = False) -> Outcome:
    """Run one schedule, which is a function of the seed alone."""
    rng = random.Random(seed)
    cluster = Cluster(seed, rng.choice((2, 3, 3, 4, 5)), guests=rng.random() < 0.1)
    try:
        _chaos(cluster, rng)
        healing, fault = _heal(cluster, rng)
    except Violation as violation:
        healing, fault = 0.0, str(violation)
    if verbose:
        _tell(cluster)
    return Outcome(seed, fault, len(cluster.decided), healing)


def _chaos(cluster: Cluster, rng: random.Random) -> None:
    cluster.run(rng.uniform(0.0, 1.0))
    cluster.loss = rng.choice((0.0, 0.0, 0.05, 0.3))
    cluster.doubled = rng.choice((0.0, 0.1, 0.5))
    cluster.delay = rng.choice(((0.0005, 0.003), (0.001, 0.1), (0.01, 0.8)))
    cluster.crash_in_effects = rng.choice((0.0, 0.0, 0.002, 0.02))
    end = cluster.now + _CHAOS_S * rng.uniform(0.3, 1.0)
    actions = [
        _crash,
        _crash,
        _restart,
        _restart,
        _stall,
        _split,
        _one_way,
        _reconnect,
        _leave,
        _admit,
        _flap,
    ]
    while cluster.now < end:
        rng.choice(actions)(cluster, rng)
        # Often a burst: what breaks agreement happens while a view is being decided.
        cluster.run(rng.expovariate(1 / 0.02) if rng.random() < 0.5 else rng.uniform(0.1, 2.5))


def _running(cluster: Cluster) -> list[Node]:
    return [node for node in cluster.nodes if node.member is not None]


def _crash(cluster: Cluster, rng: random.Random) -> None:
    live = _running(cluster)
    if live:
        cluster.crash(rng.choice(live), refuses=rng.random() < 0.5)


def _restart(cluster: Cluster, rng: random.Random) -> None:
    down = [node for node in cluster.nodes if node.member is None]
    if down:
        cluster.start(rng.choice(down))


def _stall(cluster: Cluster, rng: random.Random) -> None:
    cluster.stall(rng.choice(cluster.nodes), rng.choice((0.3, 2.0, 6.0)))


def _split(cluster: Cluster, rng: random.Random) -> None:
    order = [node.index for node in cluster.nodes]
    rng.shuffle(order)
    place = rng.randrange(1, len(order))
    cluster.split(order[:place], order[place:])


def _one_way(cluster: Cluster, rng: random.Random) -> None:
    source, target = rng.sample([node.index for node in cluster.nodes], 2)
    cluster.cut.add((source, target))


def _reconnect(cluster: Cluster, rng: random.Random) -> None:
    cluster.cut = set()
    live = _running(cluster)
    for node in live:
        for other in live:
            if node.index < other.index:
                cluster.link(node, other)


def _flap(cluster: Cluster, rng: random.Random) -> None:
    source, target = rng.sample([node.index for node in cluster.nodes], 2)
    cluster.cut |= {(source, target), (target, source)}
    cluster.later(
        rng.uniform(0.2, 3.0), lambda: cluster.cut.difference_update({(source, target), (target, source)})
    )


def _leave(cluster: Cluster, rng: random.Random) -> None:
    live = _running(cluster)
    if live:
        node = rng.choice(live)
        cluster.leave(node)
        cluster.later(rng.uniform(0.05, 2.0), partial(cluster.end, node, node.life))


def _admit(cluster: Cluster, rng: random.Random) -> None:
    """Admit a machine that never joins, or remove one that never joined, as an owner."""
    live = [node for node in _running(cluster) if node.member is not None and node.member.me.votes]
    if not live:
        return
    node = rng.choice(live)
    assert node.member is not None
    log, key = node.member.log, keys(len(cluster.nodes))[node.index]
    strangers = [other.id for other in keys(40) if other.id.raw not in cluster.by_raw]
    wanted = rng.choice(strangers)
    if log.role(key.id) != "owner" or wanted in log.revoked:
        return
    if log.role(wanted) is None:
        entry = log.admit(key, wanted, "owner", "a stranger")
    else:
        entry = log.revoke(key, wanted)
    cluster.wish(node, encode_entry(entry))


def _heal(cluster: Cluster, rng: random.Random) -> tuple[float, str | None]:
    """Restore the network and wait for agreement; in some schedules a few machines stay off.

    The running nodes must agree if they have a quorum, and must all report that they wait if not. Return the
    seconds that this took, and the fault or None.
    """
    cluster.crash_in_effects = 0.0
    cluster.heal()
    count = len(cluster.nodes)
    off = set(rng.sample(range(count), rng.randrange(count))) if rng.random() < 0.4 else set()
    for node in cluster.nodes:
        if node.index in off:
            cluster.crash(node, refuses=rng.random() < 0.5)
        else:
            cluster.start(node)
            cluster.stay(node)
    _reconnect(cluster, cluster.rng)
    begin = cluster.now
    while cluster.now < begin + _HEALING_S:
        cluster.run(0.25)
        if cluster.agreed():
            return cluster.now - begin, None
    members = [node.member for node in _running(cluster) if node.member is not None]
    # What only a machine that is off knows, the others cannot build on.
    newest = max((member.record.decided for member in members), key=lambda decided: decided.position)
    if is_quorum(newest.voters, [member.me.node for member in members]):
        return 0.0, "no agreement after everything had healed"
    if any(member.is_member and member.quorum_status(cluster.now).decides for member in members):
        return 0.0, "a node without a quorum reports that it can decide"
    return 0.0, None


def _tell(cluster: Cluster) -> None:
    for now, index, position, why in cluster.history:
        print(f"{now:9.3f}  node {index}  view {position[0]}/{position[1]}  {why}")
    for now, index, text in cluster.notes:
        print(f"{now:9.3f}  node {index}  {text}")


def run_many(seeds: Sequence[int]) -> list[Outcome]:
    """Run the schedules of these seeds on all cores."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        return pool.map(run_schedule, seeds, chunksize=50)


def message_cost(count: int) -> float:
    """Return the number of messages that one node of an idle cluster sends in a second."""
    cluster = Cluster(1, count)
    cluster.run(5.0)
    cluster.messages = Counter()
    cluster.run(10.0)
    return sum(cluster.messages.values()) / count / 10.0


def forming_time(count: int) -> float:
    """Return the seconds until admitted machines that start together agree on one view."""
    cluster = Cluster(1, count, formed=False)
    begin = cluster.now
    while not cluster.agreed() and cluster.now < begin + 120:
        cluster.run(0.1)
    return cluster.now - begin


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
            "python -m benchmarks.simulation.membership.schedules --verbose "
            f"--seed {outcome.seed}   # {outcome.fault}"
        )
    healing = sorted(outcome.healing_s for outcome in outcomes)
    figures = {
        "sim_schedules": len(outcomes),
        "sim_violations": len(faults),
        "sim_views": sum(outcome.views for outcome in outcomes),
        "healing_s_median": round(healing[len(healing) // 2], 2),
        "healing_s_worst": round(healing[-1], 2),
        "seconds": round(time.monotonic() - begin, 1),
    }
    print(json.dumps(figures))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
