"""Creates a hub's directory with its key, log and blobs; creates invites."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from barnraise.core.errors import HubError
from barnraise.core.logs.audit_log import AuditLog
from barnraise.core.units import counted
from barnraise.hub.protocol.invites import HubPlace, Invite, InviteGrant, make_invite, short_key
from barnraise.hub.protocol.messages import Name, NodeText, Role, RoundConfig, Sha256
from barnraise.hub.protocol.tls import KEY_FILE
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.log import HubLog, MemberRecord, change, read_fact
from barnraise.identity.keys import NodeKey
from barnraise.identity.node_id import NodeId
from barnraise.identity.private_file import private_directory

FOUNDING = "founding"
FOLLOWS, SUCCEEDS = "follows", "succeeds"  # facts of a mirror, and of one that took over
WITHDRAWN = "withdrawn-handovers"  # fact of a hub, which its mirrors copy
PARENT = "parent"  # fact of a region: the hub that it belongs to
_LOSSLESS = ("fp32", "fp32+zlib")


class HubFounding(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a hub that never change."""

    name: Name
    owner: NodeText
    terms: RoundConfig = RoundConfig()
    code: Sha256 | None = None
    kept: tuple[Sha256, ...] = ()  # blobs that belong to the code

    @property
    def blobs(self) -> set[str]:
        return {*self.kept, *([self.code] if self.code else [])}


def create_hub(
    directory: Path,
    name: str,
    owner: NodeId,
    terms: RoundConfig,
    *,
    code: str | None = None,
    kept: Sequence[str] = (),
    parent: NodeId | None = None,
) -> None:
    """Create a hub in a directory.

    The blobs of the code must be there (`BlobStore.put`). Raise HubError if there is a hub already.
    """
    if terms.base_codec not in _LOSSLESS:
        raise HubError(
            f"a base in {terms.base_codec} would differ from the chain", hint="Use fp32 for `base_codec`."
        )
    private_directory(directory)
    log = HubLog(directory)
    try:
        if has_founding(log):
            raise HubError(
                f"there is a hub in {directory} already", hint="Start it as it is, or name another directory."
            )
        founding = HubFounding(name=name, owner=str(owner), terms=terms, code=code, kept=tuple(kept))
        checked = msgspec.convert(msgspec.to_builtins(founding), HubFounding)
        above = [] if parent is None else [change(HubLog.set_fact, PARENT, parent.raw)]
        log.transact([change(HubLog.set_fact, FOUNDING, checked), *above])
    except msgspec.ValidationError as error:
        raise HubError(
            f"the hub cannot be created: {error}", hint="Correct the value that the message names."
        ) from error
    finally:
        log.close()


def has_founding(log: HubLog) -> bool:
    return read_fact(log.read().facts, FOUNDING, HubFounding) is not None


def has_hub(directory: Path) -> bool:
    log = HubLog(private_directory(directory))
    try:
        return has_founding(log)
    finally:
        log.close()


def owner_of(directory: Path) -> str:
    """Return the owner of the run whose hub or mirror is in this directory."""
    log = HubLog(directory)
    try:
        return _founding(log, directory).owner
    finally:
        log.close()


def is_mirror(directory: Path) -> bool:
    log = HubLog(directory)
    try:
        facts = log.read().facts
    finally:
        log.close()
    return FOLLOWS in facts and SUCCEEDS not in facts


def hub_key(directory: Path) -> NodeKey:
    """Return the hub's own key, which invites pin. It is not the machine's key."""
    return NodeKey.load_or_create(private_directory(directory) / KEY_FILE)


def hub_blobs(directory: Path) -> BlobStore:
    return BlobStore(directory / "blobs")


def create_invite(
    directory: Path,
    addresses: Sequence[str],
    *,
    role: Role = "friend",
    uses: int = 1,
    valid_s: float = 7 * 86400,
    pinned: bool = True,
) -> Invite:
    """Create an invite to the hub in this directory; the hub may be running.

    ``pinned``: no proxy ends TLS at these addresses, so members accept the hub's own key only.
    """
    log = HubLog(directory)
    try:
        founding = _founding(log, directory)
        expires = int(time.time() + valid_s)
        place = HubPlace(tuple(addresses), hub_key(directory).id, pinned)
        invite, grant = make_invite(place, founding.name, role=role, uses=uses, expires=expires)
        log.transact([change(HubLog.put_grant, grant)])
    finally:
        log.close()
    AuditLog(directory).write(
        "invite-made",
        subject=short_key(grant.key),
        detail=f"to {founding.name} as {role}, for {counted(uses, 'machine')}",
    )
    return invite


def known_invites(directory: Path) -> tuple[tuple[InviteGrant, ...], dict[str, MemberRecord]]:
    """Return the records of all invites of this hub, and its members."""
    log = HubLog(directory)
    try:
        snapshot, grants = log.read_with_grants()
    finally:
        log.close()
    return grants, snapshot.members


def withdraw_invite(directory: Path, key: str) -> None:
    """Withdraw an invite of the hub in this directory; the hub may be running."""
    log = HubLog(directory)
    try:
        log.transact([change(HubLog.withdraw_grant, key, "the owner withdrew it")])
    finally:
        log.close()
    AuditLog(directory).write("invite-withdrawn", subject=short_key(key))


def _founding(log: HubLog, directory: Path) -> HubFounding:
    founding = read_fact(log.read().facts, FOUNDING, HubFounding)
    if founding is None:
        raise HubError(f"there is no hub in {directory}", hint="Create one with `barnraise hub up`.")
    return founding
