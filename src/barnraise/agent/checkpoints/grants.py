"""Read grants: checkpoints and files of runs that other machines may fetch from this one for a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from barnraise.agent.artifact_service import ArtifactService
from barnraise.agent.checkpoints.local_store import LocalCheckpoints
from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeId

_GRANT_S = 3600.0

_log = logging.getLogger(__name__)


@dataclass
class _Grant:
    """Read access to one manifest; ``step`` 0: to files that the run was started with.

    ``parts``: those of a checkpoint in parts. ``version``: of the checkpoint, because a later group may save
    the same step again.
    """

    run: str
    step: int
    parts: frozenset[int] = frozenset()
    version: bytes = b""
    until: dict[NodeId, float] = field(default_factory=dict)  # expiry by reader


class ReadGrants:
    """Table of manifests that other machines may read, and until when.

    ``on_files`` is called when other machines gain or lose read access to the files of a run.
    """

    def __init__(
        self, local: LocalCheckpoints, artifacts: ArtifactService, on_files: Callable[[str], None]
    ) -> None:
        self._local = local
        self._artifacts = artifacts
        self._on_files = on_files
        self._loop = asyncio.get_running_loop()
        self._changing = asyncio.Lock()  # a manifest is not published and withdrawn at the same moment
        self._grants: dict[bytes, _Grant] = {}

    def __contains__(self, manifest: bytes) -> bool:
        return manifest in self._grants

    def readers(self, manifest: bytes) -> Collection[NodeId]:
        """Return the machines that may read this manifest."""
        grant = self._grants.get(manifest)
        return grant.until if grant is not None else ()

    async def grant(
        self, node: NodeId, run: str, step: int, signers: Collection[bytes], parts: Collection[int] = ()
    ) -> bytes:
        """Let a machine read a checkpoint, or some of its parts, and return the manifest of these files.

        Raise BarnraiseError if they are damaged.
        """
        wanted = run, step, frozenset(parts)
        async with self._changing:
            version = await asyncio.to_thread(self._local.version, run, step)
            granted = [
                name
                for name, old in self._grants.items()
                if (old.run, old.step, old.parts) == wanted and version in (b"", old.version)
            ]
            if not granted:
                packed = await asyncio.to_thread(self._local.publish, run, step, signers, parts)
                granted = [packed.id]
            manifest = granted[-1]
            for name, old in self._grants.items():  # a machine fetches one choice of parts after the other
                if (old.run, old.step) == (run, step) and name != manifest:
                    old.until.pop(node, None)
            self._grants.setdefault(manifest, _Grant(*wanted, version))
            self._extend(manifest, run, step, node)
            self._artifacts.allow(manifest, self._grants[manifest].until)
        return manifest

    def grant_files(self, node: NodeId, run: str, manifests: Iterable[bytes]) -> None:
        """Let a machine read the files that a run was started with."""
        for manifest in manifests:
            self._extend(manifest, run, 0, node)
        self._on_files(run)

    def revoke(self, node: NodeId, run: str) -> None:
        """Revoke all grants of a machine for a run that it has finished fetching."""
        for grant in self._grants.values():
            if grant.run == run:
                grant.until.pop(node, None)

    async def remove_expired(self) -> None:
        """Remove expired grants, and withdraw manifests that have no reader left."""
        now = self._loop.time()
        for grant in self._grants.values():
            grant.until = {node: until for node, until in grant.until.items() if until > now}
        async with self._changing:
            for manifest, grant in [item for item in self._grants.items() if not item[1].until]:
                del self._grants[manifest]
                if grant.step:
                    self._artifacts.withdraw(manifest)
                    try:
                        await asyncio.to_thread(self._local.withdraw, manifest)
                    except (BarnraiseError, OSError) as error:
                        _log.warning("cannot remove a granted checkpoint from the store: %s", error)
                else:
                    self._on_files(grant.run)

    def _extend(self, manifest: bytes, run: str, step: int, node: NodeId) -> None:
        grant = self._grants.setdefault(manifest, _Grant(run, step))
        grant.until[node] = self._loop.time() + _GRANT_S
