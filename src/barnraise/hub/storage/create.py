"""Creates a hub's directory with its key, log and blobs; creates invites."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from barnraise.core.errors import HubError
from barnraise.hub.protocol.invites import Invite, hash_token, make_invite
from barnraise.hub.protocol.messages import Name, NodeText, Role, RoundConfig, Sha256
from barnraise.hub.protocol.tls import KEY_FILE
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.log import HubLog, change, read_fact
from barnraise.identity.keys import NodeKey
from barnraise.identity.node_id import NodeId
from barnraise.identity.private_file import private_directory

FOUNDING = "founding"
FOLLOWS, SUCCEEDS = "follows", "succeeds"  # facts of a mirror, and of one that took over
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
) -> Invite:
    """Create an invite to the hub in this directory; the hub may be running."""
    log = HubLog(directory)
    try:
        founding = _founding(log, directory)
        expires = int(time.time() + valid_s)
        invite, grant = make_invite(
            tuple(addresses), hub_key(directory).id, founding.name, role=role, uses=uses, expires=expires
        )
        log.transact([change(HubLog.put_grant, grant)])
        return invite
    finally:
        log.close()


def usable_invites(directory: Path, invites: Sequence[Invite], clock: float) -> list[Invite]:
    """Return the invites that can be used for at least another hour."""
    log = HubLog(directory)
    try:
        grants = [log.grant(hash_token(invite.token_text)) for invite in invites]
    finally:
        log.close()
    pairs = zip(invites, grants, strict=True)
    return [invite for invite, grant in pairs if grant and grant.uses and grant.expires > clock + 3600.0]


def _founding(log: HubLog, directory: Path) -> HubFounding:
    founding = read_fact(log.read().facts, FOUNDING, HubFounding)
    if founding is None:
        raise HubError(f"there is no hub in {directory}", hint="Create one with `barnraise hub up`.")
    return founding
