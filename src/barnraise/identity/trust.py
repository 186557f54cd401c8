"""Trust log: the members of a cluster, their roles, and the machines that were removed.

The log is a hash chain. Each entry is signed by the node key of a machine that is an owner at that point. No
key is shared and no date counts: a machine is a member if the log says so. Two owners may sign entries for
the same index. The cluster's consensus decides which entry is next.

The log holds the discovery secrets in clear, so only members get it. A revocation is never sent to the
machine that it removes. The code is pure except for random numbers.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.core.errors import TrustError
from barnraise.core.sanitize import is_printable
from barnraise.identity.keys import NodeKey, verify_signature
from barnraise.identity.node_id import KEY_BYTES, NodeId

Role = Literal["owner", "guest"]

LOG_ENTRIES = 4096
ENTRY_BYTES = 576
NAME_LENGTH = 64
HASH_BYTES = 32
SECRET_BYTES = 32
CLUSTER_BYTES = 16
_NONCE_BYTES = 16
_SIGNATURE_BYTES = 64
_NO_HASH = bytes(HASH_BYTES)
_DOMAIN = b"barnraise trust log entry 1\0"
_PROOF = b"barnraise new node key 1\0"

_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
_Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
_Nonce = Annotated[bytes, Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
_Signature = Annotated[bytes, Meta(min_length=_SIGNATURE_BYTES, max_length=_SIGNATURE_BYTES)]
_Name = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH)]
_Index = Annotated[int, Meta(ge=0, lt=LOG_ENTRIES)]


class FoundCluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="found"):
    """First entry: creates a cluster with its first owner and its first discovery secret."""

    node: _Key
    name: _Name
    secret: _Secret
    nonce: _Nonce

    @property
    def subject(self) -> NodeId:
        return NodeId(self.node)

    def __repr__(self) -> str:
        return f"Found({self.subject.short}, {self.name!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("node", self.subject.short), ("name", self.name)]


class AdmitMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="admit"):
    """Entry that admits a machine in a role that never changes."""

    node: _Key
    role: Role
    name: _Name

    @property
    def subject(self) -> NodeId:
        return NodeId(self.node)

    def __repr__(self) -> str:
        return f"Admit({self.subject.short}, {self.role}, {self.name!r})"


class RevokeMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="revoke"):
    """Entry that removes a machine for good and gives the cluster a new discovery secret."""

    node: _Key
    secret: _Secret

    @property
    def subject(self) -> NodeId:
        return NodeId(self.node)

    def __repr__(self) -> str:
        return f"Revoke({self.subject.short})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("node", self.subject.short)]


class RotateKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="rotate"):
    """Entry by which an owner's machine changes its key; role, name and place of its admission stay.

    The old key signs the entry, and is dead afterwards like that of a removed machine. ``proof``: signature
    of the new key, bound to this place of the log. The discovery secret stays, so that the machine can
    reach the others with its new key before it has seen the decision.
    """

    node: _Key
    new: _Key
    proof: _Signature

    @property
    def subject(self) -> NodeId:
        return NodeId(self.node)

    def __repr__(self) -> str:
        return f"Rotate({self.subject.short}, {NodeId(self.new).short})"


Body = FoundCluster | AdmitMember | RevokeMember | RotateKey


class _Unsigned(msgspec.Struct, frozen=True):
    index: int
    previous: bytes
    body: Body
    signer: bytes


class SignedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entry of the log with its signature. ``previous``: hash of the entry before, zeros for the first."""

    index: _Index
    previous: _Hash
    body: Body
    signer: _Key
    signature: _Signature

    @property
    def by(self) -> NodeId:
        """Return the node that signed the entry."""
        return NodeId(self.signer)


class TrustedMember(msgspec.Struct, frozen=True):
    """Role and name of a member in the trust log."""

    role: Role
    name: str


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SignedEntry)


def encode_entry(entry: SignedEntry) -> bytes:
    """Encode an entry in its one byte form, which is hashed, stored and sent.

    Raise TrustError if the entry exceeds a limit.
    """
    try:
        data = _ENCODER.encode(entry)
        if len(data) <= ENTRY_BYTES and _DECODER.decode(data) == entry:
            _check_name(entry.body)
            return data
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise TrustError("the entry of the trust log has a wrong form") from error
    raise TrustError("the entry of the trust log has a wrong form")


def decode_entry(data: bytes) -> SignedEntry:
    """Decode exactly what ``encode_entry`` writes. Only the form is checked, not the signature."""
    if len(data) > ENTRY_BYTES:
        raise TrustError(f"an entry of the trust log has at most {ENTRY_BYTES} bytes, this has {len(data)}")
    try:
        entry = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a deep nest of nothing
        raise TrustError("the entry of the trust log cannot be read") from error
    _check_name(entry.body)
    if _ENCODER.encode(entry) != data:  # two byte forms would be two hashes of one entry
        raise TrustError("the entry of the trust log is not in its one allowed form")
    return entry


@dataclass(frozen=True, repr=False, eq=False)
class TrustLog:
    """Verified, immutable trust log. Every change returns a new one."""

    entries: tuple[SignedEntry, ...]
    secrets: tuple[bytes, ...]
    _heads: tuple[bytes, ...]
    _members: dict[NodeId, TrustedMember]
    _revoked: dict[NodeId, TrustedMember]
    _barred: frozenset[NodeId] = frozenset()

    @classmethod
    def found(cls, key: NodeKey, name: str) -> TrustLog:
        """Create a cluster with this machine as its only member and owner."""
        body = FoundCluster(
            node=key.id.raw,
            name=name,
            secret=secrets.token_bytes(SECRET_BYTES),
            nonce=secrets.token_bytes(_NONCE_BYTES),
        )
        return cls.read([_signed(key, 0, _NO_HASH, body)])

    @classmethod
    def read(cls, entries: Iterable[SignedEntry]) -> TrustLog:
        """Verify a whole log, starting with its first entry."""
        log = cls((), (), (), {}, {})
        for entry in entries:
            log = log.extended(entry)
        if not log.entries:
            raise TrustError("a trust log has at least one entry, this has none")
        return log

    def admit(self, key: NodeKey, node: NodeId, role: Role, name: str) -> SignedEntry:
        """Sign an entry that admits ``node``. The entry counts once it is in the log."""
        if node in self._barred:
            raise _was_removed(node)
        return self._next(key, AdmitMember(node=node.raw, role=role, name=name))

    def revoke(self, key: NodeKey, node: NodeId) -> SignedEntry:
        """Sign an entry that removes ``node`` for good, with a new discovery secret."""
        return self._next(key, RevokeMember(node=node.raw, secret=secrets.token_bytes(SECRET_BYTES)))

    def rotate(self, key: NodeKey, new: NodeKey) -> SignedEntry:
        """Sign an entry by which the machine of ``key`` continues with a new key."""
        body = RotateKey(
            node=key.id.raw,
            new=new.id.raw,
            proof=new.sign(_to_prove(self.head, key.id.raw, new.id.raw)),
        )
        return self._next(key, body)

    def extended(self, entry: SignedEntry) -> TrustLog:
        """Verify one more entry and return the log with it. Earlier entries are not verified again."""
        data = encode_entry(entry)
        self._check_place(entry, data)
        _check_signature(entry)
        body, node = entry.body, entry.body.subject
        self._check_rules(entry)
        members, revoked = dict(self._members), dict(self._revoked)
        if isinstance(body, FoundCluster):
            members[node] = TrustedMember("owner", body.name)
        elif isinstance(body, AdmitMember):
            members[node] = TrustedMember(body.role, body.name)
        elif isinstance(body, RotateKey):
            revoked[node] = members[node]
            members = {NodeId(body.new) if each == node else each: role for each, role in members.items()}
        else:
            revoked[node] = members.pop(node)
        fresh = (body.secret,) if isinstance(body, FoundCluster | RevokeMember) else ()
        head = hashlib.sha3_256(data).digest()
        return TrustLog(
            (*self.entries, entry),
            self.secrets + fresh,
            (*self._heads, head),
            members,
            revoked,
            self._barred,
        )

    def barring(self, nodes: Iterable[NodeId]) -> TrustLog:
        """Return the same log, in which these machines have no role and sign no further entry.

        A removal stays in force on a branch of the history that does not know it.
        """
        return replace(self, _barred=self._barred | frozenset(nodes))

    @property
    def readmitted(self) -> tuple[NodeId, ...]:
        """Return the barred machines that this log still lists: they must be removed in it, too."""
        return tuple(node for node in self._members if node in self._barred)

    def listed_role(self, node: NodeId) -> Role | None:
        """Return the role that the entries alone give a machine, also a barred one."""
        member = self._members.get(node)
        return member.role if member else None

    def current(self, node: NodeId) -> NodeId:
        """Return the key that a machine has now, after all changes of its key that this log knows."""
        for entry in self.entries:
            if isinstance(entry.body, RotateKey) and entry.body.subject == node:
                node = NodeId(entry.body.new)
        return node

    @property
    def head(self) -> bytes:
        """Return the hash of the last entry, which identifies the whole log."""
        return self._heads[-1]

    def head_at(self, count: int) -> bytes:
        """Return the head after the first ``count`` entries, to compare with a shorter log."""
        if not 0 <= count <= len(self._heads):
            raise TrustError(f"this trust log has {len(self._heads)} entries, not {count}")
        return self._heads[count - 1] if count else _NO_HASH

    @property
    def cluster(self) -> bytes:
        """Return the cluster's id, derived from the first entry, which never changes."""
        return self._heads[0][:CLUSTER_BYTES]

    @property
    def secret(self) -> bytes:
        """Return the current discovery secret. ``secrets`` has all, for machines that were offline."""
        return self.secrets[-1]

    def role(self, node: NodeId) -> Role | None:
        """Return the role of a member, or None if the node is not a member."""
        return None if node in self._barred else self.listed_role(node)

    @property
    def members(self) -> dict[NodeId, TrustedMember]:
        """Return the members in order of admission."""
        return {node: member for node, member in self._members.items() if node not in self._barred}

    @property
    def revoked(self) -> dict[NodeId, TrustedMember]:
        """Return the removed machines with their last role and name, in order of removal."""
        return self._revoked | {node: self._members[node] for node in self.readmitted}

    @property
    def owners(self) -> tuple[NodeId, ...]:
        """Return the members with the role of owner, in order of admission."""
        return tuple(node for node, member in self.members.items() if member.role == "owner")

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return self._heads[-1:] == other._heads[-1:] if isinstance(other, TrustLog) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._heads[-1:])

    def __repr__(self) -> str:
        cluster = self.cluster.hex()[:8] if self._heads else "none"
        return f"TrustLog(cluster={cluster}, entries={len(self.entries)}, members={len(self._members)})"

    def _next(self, key: NodeKey, body: Body) -> SignedEntry:
        entry = _signed(key, len(self.entries), self.head, body)
        self.extended(entry)  # what we would refuse from others we do not sign either
        return entry

    def _check_place(self, entry: SignedEntry, data: bytes) -> None:
        count = len(self.entries)
        if entry.index < count:
            if hashlib.sha3_256(data).digest() == self._heads[entry.index]:
                raise TrustError(f"entry {entry.index} is in the trust log already")
            raise TrustError(
                f"there are two different entries for place {entry.index} of the trust log",
                hint="One of them was never decided: compare with the other machines of the cluster.",
            )
        if entry.index > count:
            raise TrustError(f"the trust log's next entry is {count}, this is {entry.index}")
        if entry.previous != self.head_at(count):
            raise TrustError(f"entry {entry.index} follows another trust log than this one")

    def _check_rules(self, entry: SignedEntry) -> None:
        body, node = entry.body, entry.body.subject
        if isinstance(body, FoundCluster):
            if self.entries:
                raise TrustError("a cluster is founded once, by the first entry of its log")
            if entry.by != node:
                raise TrustError("a cluster is founded by its first owner's own signature")
            return
        if not self.entries:
            raise TrustError("the first entry of a trust log founds the cluster, this does not")
        if self.role(entry.by) != "owner":
            raise TrustError(
                f"{entry.by.short} is not an owner of this cluster and cannot admit or remove machines",
                hint="Do it on a machine that `barnraise nodes` shows as owner.",
            )
        if isinstance(body, AdmitMember):
            self._check_admission(node)
        elif isinstance(body, RotateKey):
            self._check_rotation(entry, body)
        else:
            self._check_removal(node)

    def _check_admission(self, node: NodeId) -> None:
        if node in self._members:
            raise TrustError(
                f"{node.short} is in this cluster already, as {self._members[node].role}",
                hint="A role cannot change: unpair the machine, run `barnraise leave` on it, pair it again.",
            )
        if node in self._revoked:
            raise _was_removed(node)
        if len(self.entries) + 1 + len(self._members) + 1 > LOG_ENTRIES:
            raise TrustError(
                "the trust log is full: the remaining space is reserved for removing machines",
                hint="Create a new cluster and pair the machines with it.",
            )

    def _check_rotation(self, entry: SignedEntry, body: RotateKey) -> None:
        new = NodeId(body.new)
        if entry.by != body.subject:
            raise TrustError(f"only {body.subject.short} itself can change its key")
        if new in self._members or new in self._revoked:
            raise TrustError(f"{new.short} has been in this cluster and cannot be a new key")
        if len(self.entries) + 1 + len(self._members) > LOG_ENTRIES:
            raise TrustError(
                "the trust log is full: the remaining space is reserved for removing machines",
                hint="Create a new cluster and pair the machines with it.",
            )
        if not verify_signature(new, body.proof, _to_prove(entry.previous, body.node, body.new)):
            raise TrustError(f"entry {entry.index} is not signed by the new key that it names")

    def _check_removal(self, node: NodeId) -> None:
        if node not in self._members:
            raise TrustError(f"{node.short} is not in this cluster")
        if self.owners == (node,):
            raise TrustError(
                f"{node.short} is the cluster's last owner and cannot be removed",
                hint="Pair another machine as owner first.",
            )


def _was_removed(node: NodeId) -> TrustError:
    return TrustError(
        f"{node.short} was removed from this cluster and cannot return with that id",
        hint="On that machine run `barnraise leave`: it then is a new machine and can be paired.",
    )


def check_name(name: str) -> None:
    """Raise TrustError unless the name can be shown: printable, no blank at either end."""
    if not 1 <= len(name) <= NAME_LENGTH or not is_printable(name) or name != name.strip():
        raise TrustError(
            f"a machine's name has 1 to {NAME_LENGTH} printable characters and no blank at either end",
            hint="Choose another name: `barnraise rename NAME`.",
        )


def _check_name(body: Body) -> None:
    if isinstance(body, FoundCluster | AdmitMember):
        check_name(body.name)


def _signed(key: NodeKey, index: int, previous: bytes, body: Body) -> SignedEntry:
    _check_name(body)
    signature = key.sign(_to_sign(index, previous, body, key.id.raw))
    return SignedEntry(index=index, previous=previous, body=body, signer=key.id.raw, signature=signature)


def _to_sign(index: int, previous: bytes, body: Body, signer: bytes) -> bytes:
    return _DOMAIN + _ENCODER.encode(_Unsigned(index=index, previous=previous, body=body, signer=signer))


def _to_prove(previous: bytes, old: bytes, new: bytes) -> bytes:
    return _PROOF + previous + old + new


def _check_signature(entry: SignedEntry) -> None:
    message = _to_sign(entry.index, entry.previous, entry.body, entry.signer)
    if not verify_signature(NodeId(entry.signer), entry.signature, message):
        raise TrustError(f"entry {entry.index} is not signed by the machine that it names")
