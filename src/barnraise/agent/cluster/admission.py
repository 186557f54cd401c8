"""Membership changes of machines: admit one, change a key, move to another cluster, leave for good."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from barnraise.agent.journal_storage import FILE_NAME as JOURNALS_FILE
from barnraise.core.errors import MembershipError, PairingError
from barnraise.core.files import sync_path
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import SignedEntry, TrustLog, encode_entry
from barnraise.membership.consensus.paxos import founded
from barnraise.membership.history import StoredHistory
from barnraise.membership.storage import FILE_NAME, MembershipStorage
from barnraise.membership.view import nowhere
from barnraise.pairing import PairingPeer, PairingProven

if TYPE_CHECKING:
    from barnraise.agent.daemon import Agent

_KEY = "node.key"
_NEXT = "node.key.next"  # a new key, until the cluster has decided for it
_USED = "node.used"  # beside a key that has been in a cluster
_ENTER_S = 20.0
_TOLD_S = 10.0


async def admit(agent: Agent, proven: PairingProven) -> tuple[TrustLog, list[PairingPeer]]:
    """Have the cluster admit a machine that proved the code; return the trust log and all addresses."""

    def entry(log: TrustLog) -> SignedEntry | None:
        if log.role(proven.node) == proven.role:
            return None
        return log.admit(agent.key, proven.node, proven.role, proven.name)

    if agent.log.role(proven.node) is not None and agent.peer_store[proven.node].version:
        # Its votes are lost: with the same key it could vote twice.
        raise PairingError(
            f"{proven.name} has been in this cluster with this key, and has lost its state",
            hint="There run `barnraise leave` and `barnraise up`, and pair again; unpair its old id here.",
        )
    if agent.is_alone_with_psk and len(agent.log.members) == 1 and proven.node < agent.me:
        raise PairingError("this machine is alone as well and will join yours")
    async with agent.membership_lock:
        await agent.commit_entry(entry)
    # It dials us: before it has the log it would not know our secret.
    agent.peer_store.add_hint(proven.node, proven.addresses, proven.port, len(agent.log.secrets))
    return agent.log, _all_addresses(agent)


async def enter(agent: Agent, log: TrustLog, peers: list[PairingPeer]) -> None:
    """Leave this machine's own cluster for the one that admitted it, and wait to be in its view."""
    agent.connections.forget_all("this machine joins another cluster")
    record = founded(nowhere())
    agent.storage.replace_cluster(record, tuple(map(encode_entry, log.entries)))
    agent.build_member(StoredHistory(record, log))
    agent.kv.reset()
    agent.journals.reset()
    agent.runs.reset()
    agent.queue.reset()
    agent.discovery.forget()
    agent.peer_store.keep_only(set(log.members))
    for peer in peers:
        if peer.id != agent.me:
            agent.peer_store.add_hint(peer.id, peer.addresses, peer.port, len(log.secrets))
    agent.discovery.update_tags()
    agent.discovery.dial_all()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _ENTER_S
    while not agent.member.is_member:
        if loop.time() > deadline:
            raise MembershipError(
                f"this machine is admitted, but has not joined after {_ENTER_S:g} s",
                hint="It keeps trying. See `barnraise status`, and `barnraise doctor` on both machines.",
            )
        await agent.wait_for_change(deadline - loop.time())


async def rotate_key(agent: Agent) -> NodeId:
    """Have the cluster move this machine's membership to a new key, and return the new id.

    The agent must then start again. Raise MembershipError if the cluster does not decide.
    """
    others = [node for node in agent.log.owners if node != agent.me]
    if others and not any(agent.connections.get(node) is not None for node in others):
        raise MembershipError(
            "no other owner's machine is connected that could tell the rest of the new key",
            hint="Switch on another machine that `barnraise nodes` shows as owner, then try again.",
        )
    reason = agent.blocked_reason()
    if reason:
        raise MembershipError(f"the cluster cannot decide now: {reason}")
    new = NodeKey.load_or_create(agent.directory / _NEXT)

    def entry(log: TrustLog) -> SignedEntry | None:
        # An owner that knows the decision cuts the link to the old key, maybe before this machine knows it.
        return None if log.role(new.id) is not None or agent.removed_by else log.rotate(agent.key, new)

    async with agent.membership_lock:
        await agent.runs.leave()
        agent.rotates_key = True
        await agent.commit_entry(entry)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _TOLD_S
        while others and not agent.removed_by and loop.time() < deadline:
            await asyncio.sleep(0.05)
    return new.id


def use_next_key(directory: Path) -> None:
    """Replace the node key by the new one for which the cluster has decided."""
    (directory / _NEXT).replace(directory / _KEY)
    sync_path(directory)


def has_next_key(directory: Path, log: TrustLog | None) -> bool:
    """Tell whether the cluster has decided for a new key, but the agent stopped before it was used."""
    path = directory / _NEXT
    return log is not None and path.exists() and log.role(NodeKey.load_or_create(path).id) is not None


def renew_lost_key(directory: Path, storage: MembershipStorage) -> bool:
    """Rename the node key away if its votes are lost, and return True in that case.

    A key that voted in a cluster must not vote again without its memory.
    """
    mark = directory / _USED
    lost = mark.exists() and storage.record() is None
    if lost:
        _rename_away(directory, _KEY)
    mark.touch(mode=0o600)
    return lost


def forget_cluster(directory: Path) -> None:
    """Rename the cluster's files and the node key away, so that the next start is a new machine."""
    bases = (FILE_NAME, JOURNALS_FILE)
    _rename_away(
        directory, _KEY, _NEXT, _USED, *(base + end for base in bases for end in ("", "-wal", "-shm"))
    )


def _all_addresses(agent: Agent) -> list[PairingPeer]:
    peers = [PairingPeer.of(agent.me, agent.own_addresses(), agent.listener.port)]
    for node in agent.log.members:
        place = agent.peer_store.address_of(node)
        if node != agent.me and place is not None:
            peers.append(PairingPeer.of(node, place.addresses, place.port))
    return peers


def _rename_away(directory: Path, *names: str) -> None:
    stamp = secrets.token_hex(4)
    for name in names:
        path = directory / name
        if path.exists():
            path.rename(path.with_name(f"{name}.left-{stamp}"))
