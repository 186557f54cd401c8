"""Mirror (standby) of a hub: it copies the versions, serves them, and takes over when it is told to.

A mirror reads a replica of the hub's log, fetches its blobs, and only then writes its own log. So it always
has some complete state of the hub. It has a key of its own. It becomes the hub when the owner, or the hub
itself, signs a handover. Updates that were pending are trained again.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.artifacts import FolderLimits
from barnraise.core.decoding import decode
from barnraise.core.errors import HubError, ProtocolError
from barnraise.hub.client.client import HubClient
from barnraise.hub.mirror.blob_fetcher import BlobFetcher
from barnraise.hub.protocol.messages import VectorLayout
from barnraise.hub.storage.create import FOLLOWS, FOUNDING, SUCCEEDS, HubFounding, hub_blobs, hub_key
from barnraise.hub.storage.directory_lock import lock_directory, read_facts
from barnraise.hub.storage.log import Changes, CommittedRound, HubLog, LogReplica, change, read_fact
from barnraise.hub.storage.versions import named_blobs
from barnraise.identity.keys import NodeKey, verify_signature
from barnraise.identity.node_id import NodeId
from barnraise.identity.private_file import private_directory

PREFIX = "barnraise-succession:"
_SIGNATURE = 64
logger = logging.getLogger(__name__)


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """Statement that one hub succeeds another, signed by the run's owner or the old hub."""

    hub: Annotated[bytes, Meta(min_length=32, max_length=32)]
    successor: Annotated[bytes, Meta(min_length=32, max_length=32)]
    time: Annotated[int, Meta(ge=0, le=1 << 40)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Handover)


def sign_handover(signer: NodeKey, hub: NodeId, successor: NodeId, time: int) -> str:
    """Return a signed handover as text."""
    data = _encoder.encode(Handover(hub.raw, successor.raw, time))
    return PREFIX + base64.urlsafe_b64encode(signer.sign(PREFIX.encode() + data) + data).decode()


def read_handover(text: str, signers: Sequence[NodeId]) -> Handover:
    """Parse and verify a handover. Raise HubError unless one of these signers signed it."""
    try:
        data = base64.b64decode(text.strip().removeprefix(PREFIX), altchars=b"-_", validate=True)
        signature, payload = data[:_SIGNATURE], data[_SIGNATURE:]
        if any(verify_signature(signer, signature, PREFIX.encode() + payload) for signer in signers):
            return decode(_decoder, payload, "the handover cannot be read")
    except (ValueError, ProtocolError) as error:
        raise HubError("this is not a handover of a hub", hint=_COPY_AGAIN) from error
    raise HubError("neither the owner of the run nor its hub has signed this", hint=_COPY_AGAIN)


class HubMirror:
    """Mirror of one hub, in its own directory. For one thread."""

    def __init__(self, directory: Path, client: HubClient, hub: NodeId, limits: FolderLimits) -> None:
        self._client, self._hub = client, hub
        self._log = HubLog(private_directory(directory))
        self._blobs = hub_blobs(directory)
        self._fetcher = BlobFetcher(client, self._blobs, private_directory(directory / "uploads"), limits)
        hub_key(directory)

    def close(self) -> None:
        self._log.close()

    def follow(self, wait_s: float) -> int | None:
        """Wait for a newer version and copy it.

        Return the newest version that is mirrored; None if there is none.
        """
        versions = self._log.read().versions
        if versions:
            self._client.head(versions[-1].number, wait_s, patience_s=0.0)
        after = {"after": versions[-1].number} if versions else {}
        replica = self._client.ask("GET", "/v1/replica", LogReplica, query=after)
        known = [*versions, *replica.versions]
        needed = self._fetch_code(replica) | self._fetch_chain(replica, known)
        self._write(replica)
        self._blobs.remove_all({name for name in self._blobs.names() if name not in needed})
        return known[-1].number if known else None

    def _fetch_chain(self, replica: LogReplica, known: Sequence[CommittedRound]) -> set[str]:
        layout = read_fact(replica.facts, "layout", VectorLayout)
        # What the outer optimizer remembers is flat float32; the log names the sizes of all else.
        flat = 0 if layout is None else 4 * layout.numel
        sizes = {
            step.sha256: step.size
            for version in known
            for step in (version.step, version.base)
            if step is not None
        }
        needed = named_blobs(known)
        for name in sorted(needed):
            self._fetcher.fetch(name, size=sizes.get(name, flat))
        return needed

    def _fetch_code(self, replica: LogReplica) -> set[str]:
        founding = read_fact(replica.facts, FOUNDING, HubFounding)
        if founding is None:
            raise HubError("the hub's answer does not say what the run is", hint="Update both machines.")
        if founding.code is None:
            return set()
        return {founding.code, *self._fetcher.fetch_code(founding.code)}

    def _write(self, replica: LogReplica) -> None:
        changes: Changes = [change(HubLog.set_fact, name, value) for name, value in replica.facts.items()]
        changes.append(change(HubLog.set_fact, FOLLOWS, self._hub.raw))
        changes.append(HubLog.clear_for_replica)
        changes += [change(HubLog.put_member, member) for member in replica.members]
        changes += [change(HubLog.put_grant, grant) for grant in replica.grants]
        changes += [change(HubLog.put_lease, lease) for lease in replica.leases]
        changes += [change(HubLog.put_seen, fingerprint) for fingerprint in replica.seen]
        changes += [change(HubLog.put_version, version) for version in replica.versions]
        self._log.transact(changes)


def take_over(directory: Path, word: str) -> None:
    """Turn the mirror in this directory into the run's hub.

    Raise HubError unless the handover names this mirror, or while the mirror still follows.
    """
    with lock_directory(directory):
        facts = read_facts(directory)
        founding, follows = read_fact(facts, FOUNDING, HubFounding), facts.get(FOLLOWS)
        if founding is None or follows is None:
            raise HubError(f"there is no mirror in {directory}", hint="Run `barnraise hub follow` first.")
        handover = read_handover(word, (NodeId.parse(founding.owner), NodeId(follows)))
        if (handover.hub, handover.successor) != (follows, hub_key(directory).id.raw):
            raise HubError("the handover names other hubs", hint=_COPY_AGAIN)
        log = HubLog(directory)
        try:
            log.transact([change(HubLog.set_fact, SUCCEEDS, word.strip().encode())])
        finally:
            log.close()


_COPY_AGAIN = "Copy the whole line that the hub's machine printed."
