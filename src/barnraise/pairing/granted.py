"""What a pairing grants, in words that nobody can misunderstand. Printed on both machines."""

from __future__ import annotations

from typing import Literal

from barnraise.identity.trust import Role


def granted(role: Role, side: Literal["joiner", "offerer"], other: str, *, user: str | None = None) -> str:
    """The sentences for one side. ``other`` is the name of the machine at the other end.

    ``user`` is the account that code from the other machines runs as on this one.
    """
    account = f" as user {user}" if user else ""
    undo = f"Undo: barnraise unpair {other}"
    if role == "owner" and side == "joiner":
        return (
            f"Paired as owner with {other}. Owners of its cluster may now run code on this machine{account}, "
            f"and this machine may run code on theirs, admit others and remove others.\n{undo}"
        )
    if role == "owner":
        return (
            f"{other} is now an owner. It may run code on this machine{account} and on every machine of the "
            f"cluster, admit others and remove others; owners may run code on it.\n{undo}"
        )
    if side == "joiner":
        return (
            f"Paired as guest with {other}. This machine contributes only to runs that it accepts; it may "
            f"not run code on the cluster's machines, and may admit nobody.\n{undo}"
        )
    return (
        f"{other} is now a guest. It may not run code on this machine or any other of the cluster, and may "
        f"admit nobody; it contributes to runs that it accepts.\n{undo}"
    )
