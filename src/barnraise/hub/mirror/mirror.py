"""Mirror (standby) of a hub: it copies the versions, serves them, and takes over when it is told to.

A mirror reads a replica of the hub's log, fetches its blobs, and only then writes its own log. So it always
has some complete state of the hub. It has a key of its own. It becomes the hub with a handover (`handover`).
Updates that were pending are trained again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from barnraise.artifacts import FolderLimits
from barnraise.core.errors import HubError
from barnraise.hub.client.client import HubClient
from barnraise.hub.mirror.blob_fetcher import BlobFetcher
from barnraise.hub.protocol.messages import VectorLayout
from barnraise.hub.storage.create import FOLLOWS, FOUNDING, HubFounding, hub_blobs, hub_key
from barnraise.hub.storage.log import Changes, CommittedRound, HubLog, LogReplica, change, read_fact
from barnraise.hub.storage.versions import named_blobs
from barnraise.identity.node_id import NodeId
from barnraise.identity.private_file import private_directory

logger = logging.getLogger(__name__)


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
