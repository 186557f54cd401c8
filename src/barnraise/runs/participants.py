"""Owners and guests of a run, as its workers know them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.errors import ConfigError
from barnraise.runs.record import MOST_MACHINES

VARIABLE = "BARNRAISE_GUESTS"  # not there, or empty: all machines of the run are owners'

Id = Annotated[str, Meta(pattern="^[0-9a-f]{64}\\Z")]


class Participants(msgspec.Struct, frozen=True):
    """Machines of the run spec, by role, as the agent of this worker knows them. Ids are hex."""

    here: Id
    owners: Annotated[tuple[Id, ...], Meta(max_length=MOST_MACHINES)]
    guests: Annotated[dict[Id, str], Meta(max_length=MOST_MACHINES)]  # and what they are called

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Participants | None:
        """Read the participants from the environment; return None if the run has no guest."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except ValueError as error:
            raise ConfigError(
                f"{VARIABLE} does not name the participants of this run: {error}",
                hint="Start the script with `barnraise run`, which sets it.",
            ) from error

    def encode(self) -> str:
        """Encode the participants for the environment of a worker."""
        return msgspec.json.encode(self).decode()

    def not_owners(self, others: Iterable[bytes]) -> tuple[str, ...]:
        """Return the names of machines, among ``others`` and this one, that do not belong to owners."""
        nodes = dict.fromkeys((self.here, *(node.hex() for node in others)))
        return tuple(self._name(node) for node in nodes if node not in self.owners)

    def _name(self, node: str) -> str:
        return self.guests.get(node, f"machine {node[:8]}" if node else "a machine without a certificate")
