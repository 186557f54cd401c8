"""Measurement slots: a machine takes part in one measurement at a time, in either role. Pure.

Two measurements on one uplink would each see half of it, and the result is kept for hours. Links are not
measured while the probe measures the devices, either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QUIET_S = 1.5  # without a byte the measurement is over
LONGEST_S = 6.0
AGAIN_S = 4.0
EACH_S = 30.0  # a machine that measures us more often must wait for others


@dataclass
class _Turn:
    serial: int
    began: float
    heard: float
    keeps: bool  # whether others wait for it


class MeasurementSlots:
    """Slot of one machine. ``is_sending``: it measures a link; ``is_probing``: it measures its devices."""

    def __init__(self) -> None:
        self.is_sending = self.is_probing = False
        self._turns: dict[str, _Turn] = {}
        self._declined: dict[str, int] = {}
        self._put_off: dict[str, float] = {}  # until when

    def arrives(self, node: str, serial: int, now: float) -> Literal["counts", "declined", "ignored"]:
        """Return how to treat a piece of a measurement by ``node``.

        A declined node retries later; pieces of it that are still on their way are ignored.
        """
        turn = self._turns.get(node)
        if turn is not None and turn.serial == serial:
            turn.heard = now
            return "counts"
        if self._declined.get(node) == serial:
            return "ignored"
        if self.is_sending or self.is_probing or self.measured_by(now) - {node}:
            self._declined[node] = serial
            return "declined"
        began, keeps = now, True
        if turn is not None and now - turn.began < EACH_S:
            began, keeps = turn.began, False
        self._turns[node] = _Turn(serial, began, now, keeps)
        return "counts"

    def put_off(self, node: str, now: float) -> None:
        """Note that the node has declined this machine for now."""
        self._put_off[node] = now + AGAIN_S

    def is_put_off(self, node: str, now: float) -> bool:
        return now < self._put_off.get(node, now)

    def over(self, node: str) -> None:
        if node in self._turns:
            self._turns[node].heard = float("-inf")

    def measured_by(self, now: float) -> set[str]:
        """Return the nodes that others wait for."""
        return {
            node
            for node, turn in self._turns.items()
            if turn.keeps and now - turn.heard < QUIET_S and now - turn.began < LONGEST_S
        }
