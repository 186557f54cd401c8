"""Names of machines: which one keeps a name that two have, what the other is called, and which one is meant.

Every machine computes the same names, because all of them order the machines by the trust log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from barnraise.core.errors import MembershipError
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


def find_machine(text: str, machines: Sequence[NamedMachine]) -> NodeId:
    """Return the machine with this name or id; raise MembershipError unless exactly one matches."""
    wanted = text.strip().casefold()
    shown = {machine.node: shown_name(machine.node, machine.name, machines) for machine in machines}
    matches = [node for node, name in shown.items() if name.casefold() == wanted]
    matches = matches or [
        node
        for node, name, _ in machines
        if wanted in (str(node).casefold(), node.short.casefold(), _with_id(node, name).casefold())
    ]
    if len(matches) == 1:
        return matches[0]
    if alike := [machine.node for machine in _alike(wanted, machines)]:
        names = " or ".join(f"{shown[node]} ({node.short})" for node in alike)
        raise MembershipError(f"{text.strip()} is ambiguous: {names}", hint="Use one of these names or ids.")
    names = ", ".join(f"{name} ({node.short})" for node, name in shown.items())
    raise MembershipError(
        f"no machine of this cluster is called {text!r}", hint=f"Choose one by its name or id: {names}."
    )


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
    return [machine for machine in machines if machine.name.casefold() == name.casefold()]


def _with_id(node: NodeId, name: str) -> str:
    return f"{name}-{node.short[:4].lower()}"
