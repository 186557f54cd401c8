"""The one list of attacks: role, text, and the function that tries it and judges the effect.

An attack is one function with the decorator ``attack``. Its scene holds real processes. It returns how the
attack ended, in a few words. It raises ``AssertionError`` if the attacker reached the goal; so a plain
``assert`` about the effect (a role, a log, a file, memory) is enough. See CONTRIBUTING, "Attacks".
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeVar, get_args

Role = Literal[
    "person on the LAN",
    "owner",
    "guest",
    "removed machine",
    "stranger at a hub",
    "friend",
    "hub's owner",
    "hub's proxy",
    "other local user",
    "web page",
    "friend's script",
]
ROLES: tuple[Role, ...] = get_args(Role)
Tier = Literal["quick", "full"]  # ``full``: only without --quick


class DisturbedError(AssertionError):
    """Error of an attack that reached no goal of its own, but stopped or slowed the work of others."""


class Scene(Protocol):
    """Real processes under attack, shared by the attacks of one scene."""

    @classmethod
    def opened(cls) -> AbstractContextManager[Self]:
        """Start the processes; stop them at the end."""

    def honest_work(self) -> AbstractContextManager[None]:
        """Watch the work of others during an attack, and raise DisturbedError if it did not go on."""

    def restore(self) -> None:
        """Wait until the processes are as before a failed attack."""


S = TypeVar("S", bound=Scene)
Try = Callable[[S], str]


@dataclass(frozen=True)
class Attack:
    """One attack: ``text`` says what is tried, ``function`` tries it and returns how it ended."""

    id: str
    role: Role
    text: str
    scene: type[Any]
    tier: Tier
    function: Try[Any]


ATTACKS: dict[str, Attack] = {}


def attack(
    id: str, role: Role, text: str, scene: type[S], tier: Tier = "quick"
) -> Callable[[Try[S]], Try[S]]:
    """Add a function to the list of attacks."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", id) or id in ATTACKS:
        raise ValueError(f"{id!r} is taken, or is not of the form words-with-hyphens")
    if role not in ROLES:
        raise ValueError(f"{role!r} is not one of {', '.join(ROLES)}")

    def register(function: Try[S]) -> Try[S]:
        ATTACKS[id] = Attack(id, role, text, scene, tier, function)
        return function

    return register


def all_attacks() -> list[Attack]:
    """Return every attack of the catalog, in the order of its modules; scenes stay together."""
    package = importlib.import_module("benchmarks.attacks.catalog")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    scenes = list(dict.fromkeys(listed.scene for listed in ATTACKS.values()))
    return sorted(ATTACKS.values(), key=lambda listed: scenes.index(listed.scene))


def undisturbed(is_true: bool, words: str) -> None:
    """Raise DisturbedError with these words unless it is true."""
    if not is_true:
        raise DisturbedError(words)
