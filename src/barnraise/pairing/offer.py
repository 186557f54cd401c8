"""Offer to pair: open for a limited time, good for one guess, with an outcome.

The time is passed in. A code is used up as soon as the offerer has answered the joiner's half of the key
exchange. The joiner then knows whether its guess was right.
"""

from __future__ import annotations

from typing import Literal

from barnraise.core.errors import PairingError
from barnraise.identity.keys import NodeKey
from barnraise.identity.trust import Role, check_name
from barnraise.pairing.code import PairingCode
from barnraise.pairing.protocol import Offerer
from barnraise.pairing.psk import Psk

LIFETIME_S = 600.0
_MOST_SPOILED = 32  # messages that are not a guess still cost time: this many are an attack

OfferState = Literal["open", "answered", "used", "burned", "expired", "withdrawn"]
_AGAIN = "Run `barnraise pair` for a new code."


class PairingOffer:
    """One open code, or a pre-shared key.

    A key allows many guesses and does not expire, because it cannot be guessed.
    """

    def __init__(
        self,
        secret: PairingCode | Psk,
        role: Role,
        *,
        key: NodeKey,
        name: str,
        now: float,
        lifetime_s: float = LIFETIME_S,
    ) -> None:
        if isinstance(secret, Psk) and secret.role != role:
            raise PairingError(f"the pre-shared key is for the role {secret.role}, not {role}")
        check_name(name)
        self.secret = secret
        self.role: Role = role
        self._key = key
        self._name = name
        self._created = now
        self._lifetime_s = lifetime_s
        self._state: OfferState = "open"
        self._why = ""
        self._spoiled = 0

    @property
    def tag(self) -> bytes:
        return self.secret.tag

    @property
    def is_psk(self) -> bool:
        return isinstance(self.secret, Psk)

    def state(self, now: float) -> OfferState:
        if self._state == "open" and not self.is_psk and now - self._created >= self._lifetime_s:
            return "expired"
        return self._state

    def open_at(self, now: float) -> bool:
        """Return True if a joiner may still try; advertise the offer as long as this is so."""
        return self.state(now) == "open"

    def seconds_left(self, now: float) -> float:
        return max(0.0, self._created + self._lifetime_s - now) if self.open_at(now) else 0.0

    def take(self, now: float) -> Offerer | str:
        """Return the protocol of one connection, or a sentence with the reason why there is none."""
        if not self.open_at(now):
            return self.sentence(now)
        return Offerer(self.secret, self.role, self._key, self._name, self)

    def withdraw(self) -> None:
        """Close the offer at the user's wish. A guess that was answered already stays answered."""
        if self._state == "open":
            self._state = "withdrawn"

    def sentence(self, now: float) -> str:
        """Return the outcome as a sentence for people."""
        what = "pre-shared key" if self.is_psk else "code"
        match self.state(now):
            case "open":
                return f"The {what} is open."
            case "answered":
                return f"A machine is using the {what} now."
            case "used":
                return f"The code was used by {self._why}."
            case "burned":
                return f"The code is used up: {self._why}. {_AGAIN}"
            case "expired":
                return f"The code expired after {self._lifetime_s:.0f} s. {_AGAIN}"
            case "withdrawn":
                return f"The {what} was withdrawn."

    def __repr__(self) -> str:
        return f"Offer({self.secret!r}, {self.role}, {self._state})"

    def check(self) -> None:
        if self._state != "open":
            raise PairingError("the code is used up: it allows one guess", hint=_AGAIN)

    def claim(self) -> None:
        self.check()
        if not self.is_psk:
            self._state = "answered"

    def spoil(self) -> None:
        self._spoiled += 1
        if self._spoiled >= _MOST_SPOILED and not self.is_psk and self._state == "open":
            self._state = "burned"
            self._why = "another program sends messages that do not belong to a pairing"

    def burn(self, why: str) -> None:
        if self._state == "answered":
            self._state = "burned"
            self._why = why

    def use(self, name: str) -> None:
        if self._state == "answered":
            self._state = "used"
            self._why = name


def grant_text(role: Role, side: Literal["joiner", "offerer"], other: str, *, clash: str = "") -> str:
    """Return the lines about a grant for one side.

    ``other``: name of the other machine. ``clash``: text about machines with the same name, or empty.
    """
    # The joining machine leaves: `unpair` there would remove the other machine permanently.
    undo = "Undo: barnraise leave" if side == "joiner" else f"Undo: barnraise unpair {other}"
    if role == "owner" and side == "joiner":
        text = (
            f"Joined the cluster of {other}, as an owner.\n"
            "Its owners and this machine can now run code on each other, and add or remove\nmachines."
        )
    elif role == "owner":
        text = (
            f"{other} joined, as an owner.\n"
            "It and the other owners can now run code on each other, and add or remove\nmachines."
        )
    elif side == "joiner":
        text = (
            f"Joined the cluster of {other}, as a guest.\n"
            "This machine contributes only to runs that it accepts.\n"
            "It cannot run code on the cluster's machines, or add machines."
        )
    else:
        text = (
            f"{other} joined, as a guest.\n"
            "It contributes to runs that it accepts.\n"
            "It cannot run code on this machine or any other of the cluster, or add machines."
        )
    return "\n".join(filter(None, (text, clash, undo)))
