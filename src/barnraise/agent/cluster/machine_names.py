"""Names of machines: which one keeps a name that two have, what the other is called, and which one is meant.

Every machine computes the same names, because all of them order the machines by the trust log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from barnraise.core.errors import MembershipError
from barnraise.core.names import NamedItem, match_name, skeleton
from barnraise.identity import NodeId


class NamedMachine(NamedTuple):
    """A machine of the cluster and the name that it gives itself."""

    node: NodeId
    name: str
    is_owner: bool


def shown_name(node: NodeId, name: str, machines: Sequence[NamedMachine]) -> str:
    """Return the name of a machine; it ends with a part of the id if another machine has the name.

    ``machines`` are in order of admission. The owner that was admitted first keeps the plain name, so that
    commands printed before stay right. A guest could take any name later, so it never keeps a shared one.
    """
    alike = _alike(name, machines)
    if all(machine.node == node for machine in alike):
        return name
    is_first = alike[0].node == node and alike[0].is_owner
    return name if is_first else _with_id(node, name)


def name_clashes(machines: Sequence[NamedMachine], me: NodeId) -> list[str]:
    """Return one text for each name that several machines have: what each of them is called."""
    texts = (name_clash(machine.node, machines, me) for machine in machines)
    return list(dict.fromkeys(text for text in texts if text))


def name_clash(node: NodeId, machines: Sequence[NamedMachine], me: NodeId) -> str:
    """Return what the machines are called that have the name of this one; empty if it has its own name."""
    name = next((machine.name for machine in machines if machine.node == node), "")
    alike = _alike(name, machines)
    if len(alike) < 2:
        return ""
    shown = [
        shown_name(machine.node, machine.name, machines) + (" (this machine)" if machine.node == me else "")
        for machine in alike
    ]
    return (
        f"{len(alike)} machines are called {alike[0].name}: {', '.join(shown[:-1])} and {shown[-1]}.\n"
        "To rename one, run `barnraise rename NAME` on it."
    )


def find_machine(text: str, machines: Sequence[NamedMachine], *, exact: bool = False) -> NodeId:
    """Return the machine with this name or id, or the only one whose name starts with the text.

    ``exact``: the beginning of a name is not enough. Raise MembershipError unless one matches.
    """
    named = [
        NamedItem(shown_name(node, name, machines), node, (node.short, str(node), _with_id(node, name)))
        for node, name, _ in machines
    ]
    match = match_name(text, named, kind="machine", exact=exact)
    if match.value is None:
        raise MembershipError(match.problem, hint=match.hint)
    return match.value


def check_name_is_free(name: str, machines: Sequence[NamedMachine], me: NodeId) -> None:
    """Raise MembershipError if another machine of the cluster has this name."""
    others = [machine for machine in _alike(name, machines) if machine.node != me]
    if others:
        shown = shown_name(others[0].node, others[0].name, machines)
        raise MembershipError(
            f"another machine of this cluster is called {name} already",
            hint=f"Choose another name. If that machine is gone, remove it: barnraise unpair {shown}",
        )


def _alike(name: str, machines: Sequence[NamedMachine]) -> list[NamedMachine]:
    return [machine for machine in machines if skeleton(machine.name) == skeleton(name)]


def _with_id(node: NodeId, name: str) -> str:
    return f"{name}-{node.short[:4].lower()}"
