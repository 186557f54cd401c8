"""Trust log: only owners change it, and a changed, missing or added entry is rejected."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import TrustError
from barnraise.identity import (
    AdmitMember,
    FoundCluster,
    NodeKey,
    RevokeMember,
    Role,
    RotateKey,
    SignedEntry,
    TrustedMember,
    TrustLog,
    decode_entry,
    encode_entry,
)
from barnraise.identity import trust as module
from tests.repository import ROOT

VECTORS: dict[str, Any] = json.loads((ROOT / "tests" / "vectors" / "trust.json").read_text(encoding="utf-8"))
DOMAIN = b"barnraise trust log entry 1\0"


def _key(number: int) -> NodeKey:
    return NodeKey(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big")))


MAC, PC, GUEST, STRANGER, LAPTOP = map(_key, range(1, 6))


def _with(log: TrustLog, by: NodeKey, node: NodeKey, role: Role, name: str) -> TrustLog:
    return log.extended(log.admit(by, node.id, role, name))


def _cluster() -> TrustLog:
    """Return a log with mac and pc as owners, and a guest."""
    log = _with(TrustLog.found(MAC, "mac"), MAC, PC, "owner", "pc")
    return _with(log, PC, GUEST, "guest", "guest")


def _forged(
    by: NodeKey, log: TrustLog, body: AdmitMember | RevokeMember | FoundCluster | RotateKey, **changes: object
) -> SignedEntry:
    """Return an entry with a valid signature that breaks the rules of the log."""
    fields = {"index": len(log), "previous": log.head, "body": body, "signer": by.id.raw, **changes}
    message = DOMAIN + msgspec.msgpack.encode(
        {"index": fields["index"], "previous": fields["previous"], "body": body, "signer": fields["signer"]}
    )
    return SignedEntry(**fields, signature=by.sign(message))  # type: ignore[arg-type]


def _admission(node: NodeKey, role: Role = "owner", name: str = "box") -> AdmitMember:
    return AdmitMember(node=node.id.raw, role=role, name=name)


def test_members_are_in_order_of_admission_with_roles() -> None:
    log = _cluster()
    assert list(log.members.items()) == [
        (MAC.id, TrustedMember("owner", "mac")),
        (PC.id, TrustedMember("owner", "pc")),
        (GUEST.id, TrustedMember("guest", "guest")),
    ]
    assert log.owners == (MAC.id, PC.id)
    assert [log.role(key.id) for key in (MAC, GUEST, STRANGER)] == ["owner", "guest", None]
    assert log.revoked == {}
    assert len(log) == 3


def test_trust_log_is_immutable() -> None:
    log = _cluster()
    head, members = log.head, log.members
    log.members.clear()
    longer = log.extended(log.revoke(MAC, GUEST.id))
    assert (log.head, log.members, log.role(GUEST.id)) == (head, members, "guest")
    assert longer.role(GUEST.id) is None
    with pytest.raises(AttributeError):
        log.entries = ()  # type: ignore[misc]


def test_extending_verifies_one_entry_and_not_the_log_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log = _cluster()
    entry = log.admit(MAC, LAPTOP.id, "guest", "laptop")
    seen: list[int] = []
    check = module._check_signature

    def counted(entry: SignedEntry) -> None:
        seen.append(entry.index)
        check(entry)

    monkeypatch.setattr(module, "_check_signature", counted)
    log.extended(entry)
    assert seen == [3]
    seen.clear()
    TrustLog.read(log.entries)
    assert seen == [0, 1, 2]


def test_cluster_id_and_heads_follow_entries() -> None:
    log = _cluster()
    assert log.cluster == hashlib.sha3_256(encode_entry(log.entries[0])).digest()[:16]
    assert log.head_at(0) == bytes(32)
    assert log.head_at(3) == log.head
    assert [log.head_at(n) for n in (1, 2)] == [TrustLog.read(log.entries[:n]).head for n in (1, 2)]
    assert [entry.previous for entry in log.entries] == [log.head_at(n) for n in range(3)]
    for count in (-1, 4):
        with pytest.raises(TrustError, match="3 entries"):
            log.head_at(count)
    assert TrustLog.found(MAC, "mac").cluster != TrustLog.found(MAC, "mac").cluster


def test_read_of_entries_gives_same_log() -> None:
    log = _cluster()
    log = log.extended(log.revoke(PC, MAC.id))
    again = TrustLog.read(decode_entry(encode_entry(entry)) for entry in log.entries)
    assert again == log
    assert hash(again) == hash(log)
    assert (again.members, again.revoked, again.secrets) == (log.members, log.revoked, log.secrets)
    assert again != _cluster()
    assert log != "log"


def test_revocation_rotates_secret_and_is_permanent() -> None:
    log = _cluster()
    first = log.secret
    log = log.extended(log.revoke(MAC, PC.id))
    assert log.secret != first
    assert log.secrets == (first, log.secret)
    assert len(log.secret) == 32
    assert list(log.revoked.items()) == [(PC.id, TrustedMember("owner", "pc"))]
    with pytest.raises(TrustError, match="cannot return"):
        log.admit(MAC, PC.id, "guest", "pc")
    with pytest.raises(TrustError, match="cannot return"):
        log.extended(_forged(MAC, log, _admission(PC)))
    with pytest.raises(TrustError, match="not an owner"):
        log.extended(_forged(PC, log, _admission(STRANGER)))
    with pytest.raises(TrustError, match="not in this cluster"):
        log.revoke(MAC, PC.id)


def test_entries_of_guests_and_unknown_nodes_are_rejected() -> None:
    log = _cluster()
    for key in (GUEST, STRANGER):
        with pytest.raises(TrustError, match="not an owner"):
            log.admit(key, STRANGER.id, "owner", "box")
        for body in (_admission(LAPTOP), _admission(key), RevokeMember(node=MAC.id.raw, secret=bytes(32))):
            with pytest.raises(TrustError, match="not an owner"):
                log.extended(_forged(key, log, body))


def test_signature_must_be_of_named_signer() -> None:
    log = _cluster()
    good = log.admit(MAC, LAPTOP.id, "guest", "laptop")
    assert log.extended(good).role(LAPTOP.id) == "guest"
    for changed in (
        msgspec.structs.replace(good, body=_admission(LAPTOP, "owner", "laptop")),
        msgspec.structs.replace(good, body=_admission(STRANGER, "guest", "laptop")),
        msgspec.structs.replace(good, signer=PC.id.raw),
        msgspec.structs.replace(good, signature=bytes(64)),
        _forged(STRANGER, log, _admission(LAPTOP), signer=MAC.id.raw),
    ):
        with pytest.raises(TrustError, match="not signed by the machine that it names"):
            log.extended(changed)


def test_signature_is_valid_at_one_index_of_one_log() -> None:
    log, other_log = _cluster(), _cluster()
    wish = log.admit(MAC, LAPTOP.id, "owner", "laptop")
    with pytest.raises(TrustError, match="another trust log"):
        other_log.extended(wish)
    with pytest.raises(TrustError, match="not signed"):
        other_log.extended(msgspec.structs.replace(wish, previous=other_log.head))


def test_second_admission_of_member_is_rejected() -> None:
    log = _cluster()
    with pytest.raises(TrustError, match="in this cluster already, as guest"):
        log.admit(MAC, GUEST.id, "owner", "guest")
    with pytest.raises(TrustError, match="in this cluster already"):
        log.extended(_forged(MAC, log, _admission(PC)))


def test_last_owner_cannot_be_revoked() -> None:
    log = TrustLog.found(MAC, "mac")
    log = _with(log, MAC, GUEST, "guest", "guest")
    with pytest.raises(TrustError, match="last owner"):
        log.revoke(MAC, MAC.id)
    with pytest.raises(TrustError, match="last owner"):
        log.extended(_forged(MAC, log, RevokeMember(node=MAC.id.raw, secret=bytes(32))))
    log = _with(log, MAC, PC, "owner", "pc")
    assert log.extended(log.revoke(MAC, MAC.id)).owners == (PC.id,)


def test_founding_entry_is_first_unique_and_self_signed() -> None:
    log = _cluster()
    again = FoundCluster(node=MAC.id.raw, name="mac", secret=bytes(32), nonce=bytes(16))
    with pytest.raises(TrustError, match="founded once"):
        log.extended(_forged(MAC, log, again))
    nothing: dict[str, object] = {"index": 0, "previous": bytes(32)}
    with pytest.raises(TrustError, match="own signature"):
        TrustLog.read([_forged(STRANGER, log, again, **nothing)])
    with pytest.raises(TrustError, match="first entry of a trust log founds"):
        TrustLog.read([_forged(MAC, log, _admission(PC), **nothing)])
    with pytest.raises(TrustError, match="at least one entry"):
        TrustLog.read([])


def test_splicing_cutting_and_reordering_are_refused() -> None:
    log = _cluster()
    log = log.extended(log.revoke(MAC, GUEST.id))
    foreign = _cluster().entries
    first, second, third, fourth = log.entries
    for entries in (
        [second, third, fourth],
        [first, third, fourth],
        [first, second, fourth],
        [first, third, second, fourth],
        [first, second, second],
        [foreign[0], second, third],
        [first, foreign[1]],
        [first, second, foreign[2]],
    ):
        with pytest.raises(TrustError):
            TrustLog.read(entries)
    cut = TrustLog.read([first, second, third])
    assert cut != log, "a shorter log is valid by itself; its head tells"
    assert cut.head == log.head_at(3)


def test_fork_has_other_heads_and_is_rejected() -> None:
    log = _cluster()
    admitted = log.extended(log.admit(MAC, LAPTOP.id, "owner", "laptop"))
    revoked = log.extended(log.revoke(PC, MAC.id))
    assert admitted.head_at(3) == revoked.head_at(3)
    assert admitted.head_at(4) != revoked.head_at(4)
    with pytest.raises(TrustError, match="two different entries for place 3"):
        admitted.extended(revoked.entries[3])
    with pytest.raises(TrustError, match="in the trust log already"):
        admitted.extended(admitted.entries[3])
    with pytest.raises(TrustError, match="next entry is 3, this is 4"):
        log.extended(admitted.extended(admitted.admit(MAC, STRANGER.id, "guest", "x")).entries[-1])


def test_owner_that_was_revoked_cannot_revoke_other_owner() -> None:
    log = _cluster()
    won = log.extended(log.revoke(MAC, PC.id))
    with pytest.raises(TrustError, match="not an owner"):
        won.revoke(PC, MAC.id)
    assert won.owners == (MAC.id,)


def test_full_log_keeps_space_to_revoke_every_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_ENTRIES", 8)
    log = TrustLog.found(MAC, "mac")
    for number in range(10, 13):
        log = _with(log, MAC, _key(number), "guest", f"box {number}")
    assert len(log) == 4
    with pytest.raises(TrustError, match="full"):
        log.admit(MAC, PC.id, "owner", "pc")
    for number in range(10, 13):
        log = log.extended(log.revoke(MAC, _key(number).id))
    assert len(log) == 7


def test_log_has_no_more_entries_than_limit() -> None:
    entry = msgspec.structs.replace(_cluster().entries[1], index=module.LOG_ENTRIES)
    with pytest.raises(TrustError):
        encode_entry(entry)


@pytest.mark.parametrize("name", ["", " ", " mac", "mac ", "a\nb", "\x1b[2J", "a\u202eb", "x" * 65, "\ud800"])
def test_names_that_are_not_printable_are_rejected(name: str) -> None:
    log = _cluster()
    with pytest.raises(TrustError):
        TrustLog.found(MAC, name)
    with pytest.raises(TrustError):
        log.admit(MAC, LAPTOP.id, "guest", name)
    if name != "\ud800":
        with pytest.raises(TrustError):
            log.extended(_forged(MAC, log, _admission(LAPTOP, "guest", name)))


def test_longest_entry_fits_into_limit() -> None:
    log = TrustLog.found(MAC, "🐙" * 64)
    entry = log.admit(MAC, PC.id, "owner", "🐙" * 64)
    widest = msgspec.structs.replace(entry, index=module.LOG_ENTRIES - 1)
    assert len(encode_entry(widest)) <= module.ENTRY_BYTES


def test_repr_of_entries_hides_secrets() -> None:
    log = _cluster()
    log = log.extended(log.revoke(MAC, GUEST.id))
    shown = repr(log) + repr(log.entries) + "".join(map(str, log.entries))
    shown += "".join(str(list(entry.body.__rich_repr__())) for entry in log.entries)
    for secret in log.secrets:
        assert repr(secret)[2:-1] not in shown
        assert secret.hex() not in shown
    assert log.cluster.hex()[:8] in repr(log)


@settings(deadline=None)
@given(st.binary(max_size=600))
def test_decode_entry_of_any_bytes_gives_entry_or_trust_error(data: bytes) -> None:
    try:
        entry = decode_entry(data)
    except TrustError:
        return
    assert encode_entry(entry) == data


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 3), st.data())
def test_log_with_changed_byte_is_rejected(which: int, data: st.DataObject) -> None:
    """Any byte of any entry is changed, removed or added."""
    entries = [encode_entry(entry) for entry in FOUR.entries]
    target = bytearray(entries[which])
    place = data.draw(st.integers(0, len(target) - 1))
    how = data.draw(st.sampled_from(["change", "cut", "add"]))
    if how == "change":
        target[place] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del target[place]
    else:
        target.insert(place, data.draw(st.integers(0, 255)))
    entries[which] = bytes(target)
    with pytest.raises(TrustError):
        TrustLog.read(map(decode_entry, entries))


def _four() -> TrustLog:
    log = _cluster()
    return log.extended(log.revoke(MAC, GUEST.id))


FOUR = _four()


def test_decode_entry_accepts_one_byte_form_only() -> None:
    entry = FOUR.entries[1]
    data = encode_entry(entry)
    fields = msgspec.msgpack.decode(data)
    assert decode_entry(data) == entry
    turned = msgspec.msgpack.encode(dict(reversed(fields.items())))
    wide = data.replace(b"\xa5index\x01", b"\xa5index\xcc\x01")
    more = msgspec.msgpack.encode({**fields, "more": 1})
    nested = b"\x85\xa1a" + b"\x91" * 570
    assert len({data, turned, wide, more}) == 4
    for odd in (turned, wide, more, data + b"\0", data[:-1], b"", nested, bytes(module.ENTRY_BYTES + 1)):
        with pytest.raises(TrustError):
            decode_entry(odd)
    fields["body"]["role"] = "king"
    with pytest.raises(TrustError):
        decode_entry(msgspec.msgpack.encode(fields))


def test_entries_match_golden_vectors() -> None:
    """Every byte of the log is fixed: what is hashed, what is signed, and the cluster's id."""
    entries = [decode_entry(bytes.fromhex(vector["bytes"])) for vector in VECTORS["entries"]]
    log = TrustLog.read(entries)
    assert log.cluster.hex() == VECTORS["cluster"]
    owner = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(VECTORS["private_keys"]["owner"]))
    for vector, entry in zip(VECTORS["entries"], entries, strict=True):
        raw = bytes.fromhex(vector["bytes"])
        assert encode_entry(entry) == raw
        assert hashlib.sha3_256(raw).hexdigest() == vector["head"] == log.head_at(entry.index + 1).hex()
        hexes = {"node", "secret", "nonce"}
        fields = {
            "index": vector["index"],
            "previous": bytes.fromhex(vector["previous"]),
            "body": {k: bytes.fromhex(v) if k in hexes else v for k, v in vector["body"].items()},
            "signer": bytes.fromhex(vector["signer"]),
        }
        assert owner.sign(DOMAIN + msgspec.msgpack.encode(fields)) == entry.signature
        assert msgspec.msgpack.encode({**fields, "signature": entry.signature}) == raw
    guest = NodeKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(VECTORS["private_keys"]["guest"])))
    made = TrustLog.read(entries[:1]).admit(NodeKey(owner), guest.id, "guest", "Küche")
    assert encode_entry(made).hex() == VECTORS["entries"][1]["bytes"]


# a new key for a machine


def _rotation(log: TrustLog, old: NodeKey, new_key: NodeKey, **changes: object) -> RotateKey:
    body = log.rotate(old, new_key).body
    assert isinstance(body, RotateKey)
    return msgspec.structs.replace(body, **changes)


def test_new_key_takes_role_name_and_place_of_the_old_one() -> None:
    log = _cluster()
    rotated = log.extended(log.rotate(MAC, LAPTOP))
    assert list(rotated.members) == [LAPTOP.id, PC.id, GUEST.id]
    assert rotated.members[LAPTOP.id] == log.members[MAC.id]
    assert rotated.role(MAC.id) is None
    assert MAC.id in rotated.revoked
    assert rotated.secrets == log.secrets
    assert (rotated.current(MAC.id), rotated.current(PC.id)) == (LAPTOP.id, PC.id)
    assert TrustLog.read(decode_entry(encode_entry(entry)) for entry in rotated.entries) == rotated


def test_machine_can_change_its_key_more_than_once() -> None:
    log = _cluster()
    log = log.extended(log.rotate(MAC, LAPTOP))
    log = log.extended(log.rotate(LAPTOP, STRANGER))
    assert log.current(MAC.id) == log.current(LAPTOP.id) == STRANGER.id
    assert log.role(STRANGER.id) == "owner"


def test_old_key_is_dead_after_a_rotation() -> None:
    """Tries everything that an owner may do, with the old key."""
    log = _cluster()
    log = log.extended(log.rotate(MAC, LAPTOP))
    for attempt in (
        lambda: log.admit(MAC, STRANGER.id, "owner", "x"),
        lambda: log.revoke(MAC, PC.id),
        lambda: log.rotate(MAC, STRANGER),
    ):
        with pytest.raises(TrustError, match="not an owner"):
            attempt()
    for again in (
        lambda: log.admit(PC, MAC.id, "owner", "mac"),
        lambda: log.rotate(PC, MAC),
        lambda: log.rotate(PC, LAPTOP),
    ):
        with pytest.raises(TrustError, match=r"was removed|has been in this cluster"):
            again()


def test_rotation_needs_the_signatures_of_both_keys() -> None:
    """Tries to take over a machine's place, and to claim a key of another."""
    log = _cluster()
    body = _rotation(log, MAC, LAPTOP)
    with pytest.raises(TrustError, match="only"):
        log.extended(_forged(PC, log, body))
    with pytest.raises(TrustError, match="new key"):
        log.extended(_forged(MAC, log, _rotation(log, MAC, LAPTOP, new=STRANGER.id.raw)))
    later = _with(log, PC, STRANGER, "guest", "other")
    with pytest.raises(TrustError, match="new key"):
        later.extended(_forged(MAC, later, body))  # a proof is for one place of the log


def test_guest_cannot_rotate_by_itself() -> None:
    with pytest.raises(TrustError, match="not an owner"):
        _cluster().rotate(GUEST, LAPTOP)


def test_rotations_leave_room_for_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_ENTRIES", 7)
    log = _cluster()
    log = log.extended(log.rotate(MAC, LAPTOP))
    with pytest.raises(TrustError, match="full"):
        log.rotate(LAPTOP, STRANGER)
    log = log.extended(log.revoke(PC, GUEST.id))
    assert log.extended(log.revoke(PC, LAPTOP.id)).owners == (PC.id,)
