"""Trust of the workers of a run, and the pickles that they load."""

from __future__ import annotations

from barnraise.agent_client.run_options import RunProgram
from barnraise.agent_client.run_requests import GuestRow, RolesResponse
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.runs.participants import not_owners, roles, trusted_nodes
from barnraise.runs.record import RunSpec

DESK, NAS, FRIEND, STUDENT = (NodeKey.generate() for _ in range(4))
LOG = TrustLog.found(DESK, "desk")
for key, role in ((NAS, "owner"), (FRIEND, "guest"), (STUDENT, "guest")):
    LOG = LOG.extended(LOG.admit(DESK, key.id, role, role))  # type: ignore[arg-type]


def spec_of(*nodes: NodeId) -> RunSpec:
    program = RunProgram(command=("train.py",), folder=b"")
    return RunSpec(run="r", by=DESK.id.raw, at=0, program=program, nodes=tuple(node.raw for node in nodes))


def name_of(node: NodeId) -> str:
    return {DESK.id: "desk", NAS.id: "nas", FRIEND.id: "friend", STUDENT.id: "student"}[node]


KNOWN = roles(LOG, DESK.id, spec_of(DESK.id, FRIEND.id), name_of)


def test_trusted_nodes_of_any_other_group_are_owners_only() -> None:
    """A guest that enters a torchrun group is not among the machines that its ranks trust."""
    assert set(trusted_nodes(LOG, DESK.id, None)) == {DESK.id, NAS.id}


def test_trusted_nodes_of_a_run_are_the_machines_of_its_spec() -> None:
    assert set(trusted_nodes(LOG, DESK.id, spec_of(DESK.id, NAS.id))) == {DESK.id, NAS.id}
    assert set(trusted_nodes(LOG, DESK.id, spec_of(DESK.id, FRIEND.id))) == {DESK.id, FRIEND.id}


def test_trusted_nodes_on_the_machine_of_a_guest_follow_the_spec_or_are_itself() -> None:
    assert trusted_nodes(LOG, FRIEND.id, None) == (FRIEND.id,)
    assert set(trusted_nodes(LOG, FRIEND.id, spec_of(DESK.id, FRIEND.id))) == {DESK.id, FRIEND.id}


def test_trusted_nodes_never_contain_a_removed_machine() -> None:
    removed = LOG.extended(LOG.revoke(DESK, NAS.id))
    assert trusted_nodes(removed, DESK.id, None) == (DESK.id,)
    assert trusted_nodes(removed, DESK.id, spec_of(DESK.id, NAS.id)) == (DESK.id,)


def test_roles_name_every_guest_and_mark_those_of_the_run() -> None:
    assert KNOWN.owners == (DESK.id.raw, NAS.id.raw)
    assert KNOWN.guests == (
        GuestRow(FRIEND.id.raw, "friend", True),
        GuestRow(STUDENT.id.raw, "student", False),
    )
    assert KNOWN.run_guests == ("friend",)
    assert roles(LOG, DESK.id, None, name_of).run_guests == ()


def test_not_owners_of_a_group_names_guests_and_unknown_machines() -> None:
    assert not_owners(KNOWN, [NAS.id.raw]) == ()
    assert not_owners(KNOWN, [NAS.id.raw, FRIEND.id.raw]) == ("friend",)
    assert not_owners(KNOWN, [STUDENT.id.raw]) == ("student",), "a guest that is not in the run"
    assert not_owners(KNOWN, [b"\5" * 32]) == ("machine 05050505",)
    assert not_owners(KNOWN, [b""]) == ("a machine without a certificate",), "in plaintext"


def test_not_owners_on_the_machine_of_a_guest_include_itself() -> None:
    own = RolesResponse(here=FRIEND.id.raw, owners=KNOWN.owners, guests=KNOWN.guests)
    assert not_owners(own, [DESK.id.raw]) == ("friend",), "all ranks refuse alike"
    assert not_owners(own, [FRIEND.id.raw]) == (), "its own processes may load each other's pickles"
