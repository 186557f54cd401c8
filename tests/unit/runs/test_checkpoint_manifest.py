"""Signatures, order and copies of checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from barnraise.agent_client.run_options import RunProgram
from barnraise.core.errors import RunError
from barnraise.identity import NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.runs.checkpoint_manifest import (
    CheckpointManifest,
    CheckpointPart,
    HeldCheckpoint,
    allowed_signers,
    encode,
    find_checkpoints,
    fingerprint,
    folder_name,
    folder_step,
    lacks_copies,
    newest_checkpoint,
    next_copy_target,
    next_part_copies,
    outdated_folders,
    plan_fetch,
    read_manifest,
    sign,
    to_held_checkpoint,
)
from barnraise.runs.record import RunSpec

RUN = "train-abcd"
KEY, STRANGER, GUEST, OTHER_GUEST = (NodeKey.generate() for _ in range(4))
HASH = "ab" * 32
MANIFEST = CheckpointManifest(
    run=RUN, step=42, generation=3, digest=HASH, previous=None, file=HASH, skeleton=""
)
DATA = encode(MANIFEST)
SEAL = encode(sign(KEY, RUN, 42, fingerprint(DATA)))
MAY = {KEY.id.raw}


def order(*nodes: NodeKey) -> RunSpec:
    named = tuple(key.id.raw for key in nodes)
    program = RunProgram(command=("x",), folder=bytes(32))
    return RunSpec(run=RUN, by=KEY.id.raw, at=0.0, program=program, nodes=named)


def test_manifest_signed_by_a_member_is_valid() -> None:
    assert read_manifest(DATA, SEAL, RUN, MAY) == MANIFEST


@pytest.mark.parametrize(
    ("data", "seal", "why"),
    [
        (DATA, None, "it is not signed"),
        (
            DATA,
            encode(sign(STRANGER, RUN, 42, fingerprint(DATA))),
            "it was not signed by a machine of this cluster",
        ),
        (encode(replace(MANIFEST, step=43)), SEAL, "it was changed after it was signed"),
        (DATA, encode(replace(sign(STRANGER, RUN, 42, fingerprint(DATA)), node=KEY.id.raw)), "changed after"),
        (DATA, encode(sign(KEY, "other-run", 42, fingerprint(DATA))), "it was changed after it was signed"),
        (encode(replace(MANIFEST, run="other-run")), SEAL, "it belongs to run other-run"),
        (DATA[:-5], SEAL, "it cannot be read"),
        (DATA, SEAL[:-5], "its signature cannot be read"),
        (DATA.replace(b'"format":2', b'"format":1'), SEAL, "it cannot be read"),
    ],
)
def test_invalid_manifest_is_rejected_with_the_reason(data: bytes, seal: bytes | None, why: str) -> None:
    with pytest.raises(RunError, match=why):
        read_manifest(data, seal, RUN, MAY)


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
@settings(max_examples=200)
def test_changed_byte_of_a_signed_manifest_is_rejected(place: int, change: int) -> None:
    edited = DATA[:place] + bytes([DATA[place] ^ change]) + DATA[place + 1 :]
    with pytest.raises(RunError):
        read_manifest(edited, SEAL, RUN, MAY)


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_random_bytes_are_rejected(data: bytes, seal: bytes) -> None:
    with pytest.raises(RunError):
        read_manifest(data, seal, RUN, MAY)


def test_owners_and_named_guests_may_sign_but_not_removed_machines() -> None:
    log = TrustLog.found(KEY, "mac")
    for key, role in ((STRANGER, "owner"), (GUEST, "guest"), (OTHER_GUEST, "guest")):
        log = log.extended(log.admit(KEY, key.id, role, role))  # type: ignore[arg-type]
    assert allowed_signers(log, order(KEY, GUEST)) == {KEY.id.raw, STRANGER.id.raw, GUEST.id.raw}
    log = log.extended(log.revoke(KEY, STRANGER.id))
    assert allowed_signers(log, order(KEY, STRANGER)) == {KEY.id.raw}


def test_own_checkpoints_come_before_those_of_the_resumed_run() -> None:
    held = [
        HeldCheckpoint("b", 5, True),
        HeldCheckpoint("a", 60, True),
        HeldCheckpoint("b", 9, False),
        HeldCheckpoint("c", 99, True),
    ]
    assert newest_checkpoint(held, ["b", "a"]) == HeldCheckpoint("b", 5, True), (
        "and an agreed one before a provisional one"
    )
    assert newest_checkpoint(held[1:2] + held[3:], ["b", "a"]) == HeldCheckpoint("a", 60, True)
    assert newest_checkpoint(held, ["x"]) is None


@given(st.sets(st.integers(0, 9), min_size=1), st.integers(1, 9))
def test_copies_are_sent_one_by_one_until_there_are_enough(holders: set[int], copies: int) -> None:
    """All holders agree on the sender, no machine gets a copy twice, and the copying ends."""
    have = {bytes([number]) for number in holders}
    all_nodes = [bytes([number]) for number in range(10)]
    while True:
        given = [node for me in have if (node := next_copy_target(me, have, all_nodes, copies)) is not None]
        if not given:
            break
        assert len(given) == 1
        assert given[0] not in have
        have.add(given[0])
    assert len(have) == max(copies, len(holders))


PARTS = tuple(CheckpointPart(number, 100, HASH) for number in (1, 2, 5))
IN_PARTS = replace(MANIFEST, file=None, parts=PARTS)


def test_manifest_names_one_file_or_parts() -> None:
    def read(manifest: CheckpointManifest) -> CheckpointManifest:
        data = encode(manifest)
        return read_manifest(data, encode(sign(KEY, RUN, 42, fingerprint(data))), RUN, MAY)

    assert read(IN_PARTS) == IN_PARTS
    for wrong in (
        replace(MANIFEST, parts=PARTS),
        replace(MANIFEST, file=None),
        replace(IN_PARTS, parts=PARTS + PARTS[:1]),
    ):
        with pytest.raises(RunError, match="names no state, or a part twice"):
            read(wrong)


def in_parts(*parts: int, step: int = 42, generation: int = 3, agreed: bool = True) -> HeldCheckpoint:
    return replace(to_held_checkpoint(IN_PARTS, parts), step=step, generation=generation, agreed=agreed)


def test_checkpoint_in_parts_counts_if_machines_have_all_of_them_together() -> None:
    assert find_checkpoints({"a": [in_parts(1, 2)], "b": [in_parts(2)]}) == []
    (found,) = find_checkpoints({"a": [in_parts(1, 2)], "b": [in_parts(5, 2), in_parts(1, step=50)]})
    assert found.held == replace(in_parts(), parts=())
    assert found.holders == {"a": {1, 2}, "b": {2, 5}}
    other = in_parts(5, generation=4)
    assert find_checkpoints({"a": [in_parts(1, 2)], "b": [other]}) == [], "of another group"
    (known,) = find_checkpoints({"a": [in_parts(1, 2, agreed=False)], "b": [in_parts(5)]})
    assert known.held.agreed, "one of them knows that it counts"
    (partly,) = find_checkpoints({"a": [in_parts(1)]}, incomplete=True)
    assert partly.holders == {"a": {1}}


def test_checkpoints_in_one_file_are_found_on_each_machine() -> None:
    held, other = HeldCheckpoint(RUN, 42, True, 3), HeldCheckpoint(RUN, 42, False, 3)
    found = find_checkpoints({"a": [held], "b": [held, in_parts(1)], "c": [other]})
    assert {each.held: sorted(each.holders) for each in found} == {held: ["a", "b"], other: ["c"]}


def test_missing_parts_come_from_the_machine_that_has_most_of_them() -> None:
    holders = {"a": frozenset({1, 2}), "b": frozenset({2, 5, 7}), "c": frozenset[int]()}
    assert plan_fetch({1, 2, 5}, holders) == ("a", (1, 2))
    assert plan_fetch({2, 5}, holders) == ("b", (2, 5))
    assert plan_fetch({9}, holders) is None
    assert plan_fetch({9}, dict[str, frozenset[int]]()) is None


@given(
    st.lists(st.sets(st.integers(0, 4)), min_size=3, max_size=5).filter(lambda held: any(held)),
    st.integers(1, 5),
)
def test_parts_are_copied_until_each_is_on_enough_machines(held: list[set[int]], copies: int) -> None:
    """All holders agree on who sends what, no machine gets a part twice, and the copying ends."""
    nodes = [bytes([number]) for number in range(len(held))]
    have = dict(zip(nodes, held, strict=True))
    every = set().union(*held)
    while True:
        now = {node: frozenset(parts) for node, parts in have.items()}
        sent = [(me, copy) for me in nodes if (copy := next_part_copies(me, now, nodes, copies)) is not None]
        if not sent:
            break
        for me, (target, parts) in sent:
            assert lacks_copies(me, now, copies)
            assert now[me].issuperset(parts)
            assert not have[target].intersection(parts)
            have[target] |= set(parts)
    now = {node: frozenset(parts) for node, parts in have.items()}
    wanted = min(copies, len(nodes))
    assert all(sum(part in parts for parts in have.values()) >= wanted for part in every)
    assert not any(lacks_copies(me, now, wanted) for me in nodes)


def test_newest_three_checkpoints_are_kept() -> None:
    written = {folder_name(step): float(at) for at, step in enumerate((7, 8, 9, 100_000_000))}
    others = {"new-1": 9.0, ".draft-00000001": 9.0, "step-x": 9.0}
    assert outdated_folders({**written, **others}, keep=100_000_000) == [folder_name(7)]
    assert outdated_folders(written, keep=7) == []


def test_checkpoints_of_a_dropped_branch_are_deleted_first() -> None:
    written = {folder_name(step): float(at) for at, step in enumerate((7000, 8000, 9000, 5100))}
    assert outdated_folders(written, keep=5100) == [folder_name(7000)]
    written[folder_name(5200)] = 4.0
    assert outdated_folders(written, keep=5200) == [folder_name(7000), folder_name(8000)]
    assert folder_step(folder_name(100_000_000)) == 100_000_000
