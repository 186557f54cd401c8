"""Names of machines: clashes, and which machine a typed name means."""

from __future__ import annotations

import pytest

from barnraise.agent.cluster.machine_names import (
    NamedMachine,
    check_name_is_free,
    find_machine,
    name_clash,
    name_clashes,
    shown_name,
)
from barnraise.core.errors import MembershipError
from barnraise.identity import NodeId

MAC, FIRST, SECOND = (NodeId(bytes([number]) * 32) for number in (1, 2, 3))
LATER = f"pc-{SECOND.short[:4].lower()}"
EARLIER = f"pc-{FIRST.short[:4].lower()}"
OWNERS = [NamedMachine(MAC, "mac", True), NamedMachine(FIRST, "pc", True), NamedMachine(SECOND, "PC", True)]
GUEST_FIRST = [NamedMachine(FIRST, "pc", False), NamedMachine(SECOND, "pc", True)]


def test_shown_name_of_the_first_of_two_stays_as_it_was() -> None:
    assert shown_name(FIRST, "pc", OWNERS) == "pc"
    assert shown_name(SECOND, "PC", OWNERS) == LATER.replace("pc", "PC")
    assert shown_name(MAC, "mac", OWNERS) == "mac"


def test_shown_name_of_a_removed_machine_with_a_used_name_has_its_id() -> None:
    assert shown_name(SECOND, "pc", OWNERS[:2]) == LATER
    assert shown_name(SECOND, "nas", OWNERS[:2]) == "nas"


def test_guest_never_keeps_a_shared_name() -> None:
    assert [shown_name(*machine[:2], GUEST_FIRST) for machine in GUEST_FIRST] == [EARLIER, LATER]


def test_name_clash_tells_both_names_and_marks_this_machine() -> None:
    there = name_clash(SECOND, GUEST_FIRST, SECOND)
    assert there.startswith(f"2 machines are called pc: {EARLIER} and {LATER} (this machine).\n")
    assert "`barnraise rename NAME`" in there
    assert name_clashes(GUEST_FIRST, SECOND) == [there]
    assert name_clashes(OWNERS[:2], MAC) == []


def test_find_machine_takes_shown_name_long_name_and_id() -> None:
    assert find_machine("pc", OWNERS) == FIRST
    assert find_machine(EARLIER, OWNERS) == FIRST
    assert find_machine(LATER, OWNERS) == SECOND
    assert find_machine(SECOND.short, OWNERS) == SECOND
    assert find_machine(f" {MAC} ", OWNERS) == MAC


def test_find_machine_with_ambiguous_name_tells_the_names() -> None:
    with pytest.raises(MembershipError, match=f"more than one machine starts with 'pc': {EARLIER}, {LATER}"):
        find_machine("pc", GUEST_FIRST)
    with pytest.raises(MembershipError, match="no machine is called 'pc'") as refused:
        find_machine("pc", GUEST_FIRST, exact=True)
    assert f"{EARLIER}, {LATER}" in (refused.value.hint or "")
    with pytest.raises(MembershipError, match="no machine is called 'nas'"):
        find_machine("nas", OWNERS)


def test_check_name_is_free_refuses_the_name_of_another_machine() -> None:
    with pytest.raises(MembershipError, match="another machine of this cluster is called Mac already"):
        check_name_is_free("Mac", OWNERS, FIRST)
    check_name_is_free("mac", OWNERS, MAC)
    check_name_is_free("nas", OWNERS, MAC)


def test_guest_with_a_look_alike_name_is_shown_with_its_id() -> None:
    """A guest takes the name of an owner's machine in letters of another script."""
    machines = [NamedMachine(FIRST, "pc", True), NamedMachine(SECOND, "рс", False)]
    assert shown_name(FIRST, "pc", machines) == "pc"
    assert shown_name(SECOND, "рс", machines) == f"рс-{SECOND.short[:4].lower()}"
    with pytest.raises(MembershipError, match="is called"):
        check_name_is_free("ｐｃ", machines, SECOND)
