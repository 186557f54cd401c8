"""Resumable uploads: append pieces to a file, check the file, and pass the update to its round.

The name of a partial file depends on the sender and the declaration, so the same declaration resumes it, even
after a restart. The file becomes a blob only if its content has the declared hash and passes every check.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from barnraise.core.errors import HubError, HubRefused, ProtocolError
from barnraise.core.files import sync, write_all
from barnraise.hub.aggregation.aggregator import RoundFigures
from barnraise.hub.aggregation.update_checks import (
    UpdateVerdict,
    after_acceptance,
    clip_scale,
    judge_copy,
    learned_norm,
    median_norm,
    trusted_merge_count,
)
from barnraise.hub.protocol.messages import (
    PIECE_BYTES,
    HubProgress,
    UpdateDeclaration,
    VectorLayout,
    VersionStep,
    check_layout,
)
from barnraise.hub.rounds import state_machine
from barnraise.hub.rounds.leases import PendingUpdate
from barnraise.hub.rounds.sample_pool import first_samples
from barnraise.hub.rounds.state_machine import (
    BASE_THERE,
    BEGIN_AGAIN,
    RefuseRequest,
    lease_for,
    staleness_weight,
    versions_behind,
)
from barnraise.hub.server.bodies import ArrivedBody
from barnraise.hub.server.hub import Hub
from barnraise.hub.storage.blobs import FREE_SPACE_HINT, hash_file
from barnraise.hub.storage.log import MOST_SEEN, AcceptedUpdate, HubLog, UpdateFingerprint, change

logger = logging.getLogger(__name__)
_MOST_BASE_BYTES = 1 << 42
_ABANDONED_S = 86_400.0
_FRESH_S = 40.0  # after a piece started, its sender is taken as active
_OWNED = 16  # characters of a file's name that say whose it is
# The optional check of an update that is about to count: the file, the version it begins from, its scale.
HeldOut = Callable[[Path, int, float], UpdateVerdict]


class _Upload:
    """State of one upload. ``heard``: when it was declared, or when its last piece started."""

    def __init__(self, node: str, declared: UpdateDeclaration, path: Path, now: float) -> None:
        self.node, self.declared, self.path = node, declared, path
        self.lock = asyncio.Lock()
        self.done: HubProgress | None = None
        self.heard = now

    def offset(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0


class UploadService:
    """Resumable uploads of one hub."""

    def __init__(self, hub: Hub, held_out: HeldOut | None = None) -> None:
        self._hub, self._held_out = hub, held_out
        self._trying = asyncio.Lock()
        self._directory = hub.directory / "uploads"
        self._directory.mkdir(exist_ok=True)
        self._older = defaultdict[str, set[str]](set)  # files from before this process, by how they begin
        for file in self._directory.iterdir():
            if hub.clock() - file.stat().st_mtime > _ABANDONED_S:
                file.unlink(missing_ok=True)
            else:
                self._older[file.name[:_OWNED]].add(file.name)
        self._uploads: dict[str, _Upload] = {}
        self._declaring = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by member
        self._latest: dict[str, str] = {}  # the name of each member's upload

    async def declare(self, node: str, declared: UpdateDeclaration) -> HubProgress:
        """Start or resume an upload. Raise HubRefused if its update could not count."""
        name = _name(node, declared)
        existing = self._uploads.get(name)
        if existing is not None and existing.done is not None:
            return existing.done
        if any(
            fingerprint.lease == declared.lease and fingerprint.sha256 == declared.sha256
            for fingerprint in self._hub.seen
        ):
            # It counts already: the response was lost, and the hub has restarted since.
            return HubProgress(id=name, offset=declared.size, size=declared.size, accepted=True)
        if declared.kind == "base":
            self._check_base(node, declared)
        else:
            await self._check_update(node, declared)
        async with self._declaring[node]:
            if name not in self._uploads:
                await asyncio.to_thread(self._remove, self._forget_others(node, name, declared.lease))
                self._uploads[name] = _Upload(node, declared, self._directory / name, self._hub.now())
            upload = self._uploads[name]
            if declared.lease is not None:
                await self._hub.step(state_machine.UploadProgressed(declared.lease, upload.offset()))
        return _progress(name, upload)

    def note_piece(self, node: str, name: str) -> None:
        """Note that a piece has started to arrive. Raise HubRefused if there is no such upload."""
        self._find(node, name).heard = self._hub.now()

    def progress(self, node: str, name: str) -> HubProgress:
        """Return how much of an upload has arrived."""
        return _progress(name, self._find(node, name))

    async def append(self, node: str, name: str, offset: int, piece: ArrivedBody) -> HubProgress:
        """Append a piece to an upload.

        Repeating a piece is harmless. Raise HubRefused with the right offset if it does not fit.
        """
        upload = self._find(node, name)
        async with upload.lock:
            if self._find(node, name) is not upload:
                raise _no_upload()
            if upload.done is not None:
                return upload.done
            here, size, end = upload.offset(), upload.declared.size, offset + piece.size
            if offset > here or end > size or piece.size > PIECE_BYTES:
                message = f"a piece of {piece.size} bytes at {offset} does not continue {here} of {size}"
                raise HubRefused(409, "offset", message, hint="Continue at the returned offset.", offset=here)
            if upload.declared.lease is not None:
                arrived = max(here, end)
                await self._hub.step(state_machine.UploadProgressed(upload.declared.lease, arrived))
            try:
                await asyncio.to_thread(_append, upload.path, piece, here - offset, end == size)
            except OSError as error:
                message = f"the hub's disk failed: {error.strerror or error}"
                raise HubRefused(503, "disk", message, hint=FREE_SPACE_HINT, retry_s=5.0) from error
            if upload.offset() == size:
                await self._finish(name, upload)
            return _progress(name, upload)

    async def _finish(self, name: str, upload: _Upload) -> None:
        declared = upload.declared
        try:
            if await asyncio.to_thread(hash_file, upload.path) != declared.sha256:
                message = "the uploaded file does not have the declared hash"
                raise HubRefused(422, "digest", message, hint="Declare it and send it again.")
            if declared.kind == "base":
                upload.done = await self._accept_base(name, upload)
            else:
                upload.done = await self._accept_update(name, upload)
        except HubRefused as error:
            if error.status == 409:
                await self._hub.record_refusal(upload.node, error.kind, error.message)
            if error.status != 503:
                await asyncio.to_thread(upload.path.unlink, missing_ok=True)
                del self._uploads[name]
            raise
        except HubError as error:
            raise HubRefused(503, "disk", error.message, hint=error.hint, retry_s=5.0) from error

    async def _accept_base(self, name: str, upload: _Upload) -> HubProgress:
        declared, hub = upload.declared, self._hub
        assert declared.layout is not None
        assert declared.course is not None
        try:
            await asyncio.to_thread(_check_state, upload.path, declared.layout, hub)
        except ProtocolError as error:
            raise HubRefused(422, "schema", error.message, hint=error.hint) from error
        await asyncio.to_thread(hub.blobs.adopt, upload.path, declared.sha256)
        from barnraise.hub.aggregation.outer_step import first_version

        step = VersionStep("base", 0, declared.sha256, declared.size, hub.founding.terms.base_codec)
        await hub.set_base(first_version(step, hub.clock()), declared.layout, declared.course)
        return HubProgress(id=name, offset=declared.size, size=declared.size, accepted=True)

    async def _accept_update(self, name: str, upload: _Upload) -> HubProgress:
        declared, hub, node = upload.declared, self._hub, upload.node
        figures = await self._measure(node, upload.path, declared.version)
        role = hub.member(node).role
        merged = trusted_merge_count(role, declared.merged, declared.samples)
        norm = figures.norm / math.sqrt(max(1, declared.samples) / merged)
        seen_before, terms = hub.seen, hub.founding.terms
        verdict = await asyncio.to_thread(judge_copy, node, declared.sha256, figures.sketch, seen_before)
        if not verdict.kind and self._held_out is not None:
            fitting = clip_scale(norm, median_norm(seen_before, merged), terms)
            async with self._trying:  # or those that wait take all threads
                verdict = await asyncio.to_thread(self._held_out, upload.path, declared.version, fitting)
            if not verdict.kind:  # it took a while: the same may have come from elsewhere
                verdict = judge_copy(node, declared.sha256, figures.sketch, hub.seen)
        if verdict.kind:
            await self._refuse(node, verdict.kind, verdict.reason)
        update = msgspec.structs.replace(_delivered(node, declared), of_stranger=role == "stranger")
        lent = lease_for(hub.state, update)
        if isinstance(lent, RefuseRequest):
            raise lent.error()
        usual = median_norm(hub.seen, merged)
        scale = clip_scale(norm, usual, terms)
        await asyncio.to_thread(hub.blobs.adopt, upload.path, declared.sha256)
        seen = UpdateFingerprint(
            node=node,
            lease=lent.id,
            sha256=declared.sha256,
            norm=0.0 if update.of_stranger else learned_norm(norm, usual, terms),
            sketch=figures.sketch,
            merged=merged,
        )
        arrival = AcceptedUpdate(
            update=update,
            sha256=declared.sha256,
            size=declared.size,
            spans=declared.trained or first_samples(lent.spans, declared.samples),
            norm=norm,
            scale=scale,
            loss=declared.loss,
            merged=merged,
            has_strangers=declared.has_strangers,
        )
        weight = declared.samples * staleness_weight(versions_behind(hub.state, declared.version))
        try:
            # As it is now: it may have been refused, or sent away, since this one began to arrive.
            after = after_acceptance(hub.member(node), declared.samples)
            hub.arrivals[name] = arrival
            changes = [
                change(HubLog.put_arrival, arrival),
                change(HubLog.put_member, after),
                change(HubLog.put_seen, seen),
            ]
            await hub.step(state_machine.UpdateAccepted(update, int(seen.norm > 0)), changes)
        except HubRefused:
            hub.arrivals.pop(name, None)
            hub.release_blob(declared.sha256)
            raise
        hub.members[node] = after_acceptance(hub.members[node], declared.samples)
        hub.seen = [*hub.seen, seen][-MOST_SEEN:]
        size = declared.size
        return HubProgress(id=name, offset=size, size=size, accepted=True, weight=weight, clipped=scale)

    async def _measure(self, node: str, path: Path, version: int) -> RoundFigures:
        finisher = await self._hub.aggregator()
        try:
            return await asyncio.to_thread(finisher.measure, path, version)
        except ProtocolError as error:
            await self._refuse(node, "not-finite" if error.not_finite else "schema", error.message)
            raise AssertionError from error  # refused above

    async def _refuse(self, node: str, kind: str, reason: str, status: int = 422) -> None:
        """Record the refusal and raise HubRefused. Never returns."""
        if await self._hub.refuse_update(node, kind, reason):
            reason += "; this machine is in quarantine now"
        raise HubRefused(status, kind, f"the update was refused: {reason}", hint=BEGIN_AGAIN)

    def _check_base(self, node: str, declared: UpdateDeclaration) -> None:
        if self._hub.member(node).role != "owner":
            raise HubRefused(403, "role", "only the owner may push the base", hint="Ask the owner to start.")
        if self._hub.version is not None:
            raise BASE_THERE.error()
        if declared.layout is None or declared.course is None or declared.size > _MOST_BASE_BYTES:
            raise HubRefused(422, "schema", "a base needs its layout and course", hint=_SAME_VERSION)
        try:
            check_layout(declared.layout)
        except HubError as error:
            raise HubRefused(422, "schema", error.message, hint=error.hint) from error

    async def _check_update(self, node: str, declared: UpdateDeclaration) -> None:
        self._hub.member(node)
        if declared.layout is not None or declared.course is not None:
            raise HubRefused(422, "schema", "an update has no layout and no course", hint=_SAME_VERSION)
        named = self._hub.state.lent.get(declared.lease or "")
        if named is not None and named.node != node:
            await self._refuse(node, "forged", "it was sent for another member's lease", 403)
        lent = lease_for(self._hub.state, _delivered(node, declared))
        if isinstance(lent, RefuseRequest):
            await self._hub.record_refusal(node, lent.kind, lent.message)
            raise lent.error()
        if declared.sha256 in self._hub.own_blobs():
            await self._refuse(node, "copy", "the run already contains these bytes")
        max_bytes = (await self._hub.aggregator()).max_update_bytes()
        if declared.size > max_bytes:
            await self._refuse(
                node, "size", f"it has {declared.size} bytes, at most {max_bytes} are allowed", 413
            )

    def _find(self, node: str, name: str) -> _Upload:
        upload = self._uploads.get(name)
        if upload is None or upload.node != node:
            raise _no_upload()
        return upload

    def _is_fresh(self, upload: _Upload, lease: str | None) -> bool:
        """Return True while the upload for the same lease is active.

        Two machines of one site that lost contact may upload for the same lease; the first one goes on.
        """
        if upload.done is not None or upload.declared.lease != lease:
            return False
        return self._hub.now() - upload.heard < _FRESH_S

    def _forget_others(self, node: str, name: str, lease: str | None) -> set[str]:
        """Forget the member's previous upload, because each member has one.

        Return the files to remove, including those from before a restart.
        """
        previous_name = self._latest.get(node, name)
        previous = self._uploads.get(previous_name)
        if previous is not None and (previous.lock.locked() or self._is_fresh(previous, lease)):
            message = "the previous upload of this member is not finished"
            raise HubRefused(503, "busy", message, hint="Try again in a second.", retry_s=1.0)
        self._uploads.pop(previous_name, None)
        self._latest[node] = name
        return {previous_name, *self._older.pop(_owned(node), ())} - {name}

    def _remove(self, names: set[str]) -> None:
        for name in names:
            (self._directory / name).unlink(missing_ok=True)


def _name(node: str, declared: UpdateDeclaration) -> str:
    identity = f"{declared.kind} {declared.lease} {declared.sha256} {declared.size}"
    return _owned(node) + hashlib.sha256(identity.encode()).hexdigest()[:16]


def _no_upload() -> HubRefused:
    return HubRefused(404, "upload", "there is no such upload", hint="Declare it: POST /v1/uploads.")


def _owned(node: str) -> str:
    """Return the prefix of the names of a member's uploads."""
    return hashlib.sha256(node.encode()).hexdigest()[:_OWNED]


def _delivered(node: str, declared: UpdateDeclaration) -> PendingUpdate:
    """Return the update as it would enter its round."""
    lease, name = declared.lease or "", _name(node, declared)
    return PendingUpdate(name, node, lease, declared.version, declared.samples, declared.trained)


def _progress(name: str, upload: _Upload) -> HubProgress:
    if upload.done is not None:
        return upload.done
    return HubProgress(id=name, offset=upload.offset(), size=upload.declared.size)


def _append(path: Path, piece: ArrivedBody, skip: int, is_last: bool) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600)
    try:
        for part in piece.parts(skip):
            write_all(descriptor, part)
        if is_last:
            sync(descriptor)
    finally:
        os.close(descriptor)


def _check_state(path: Path, layout: VectorLayout, hub: Hub) -> None:
    from barnraise.hub.aggregation.outer_step import check_base

    check_base(path, layout, hub.founding.terms)


_SAME_VERSION = "Install the same Barnraise version as the hub's."
