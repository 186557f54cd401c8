"""Choice of the machine that sends the notices of an attempt of a job. Pure.

The coordinator writes its choice into the record of the run. So all machines know the same one, and of two
machines only one sends what a version of the record calls for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple


class ChosenNotifier(NamedTuple):
    """Machine that sends the notices, and why. ``node`` is empty if it is the one that added the job."""

    node: bytes
    why: str


def choose_notifier(
    adder: bytes, present: Sequence[bytes], notifying: Collection[bytes], name: Callable[[bytes], str]
) -> ChosenNotifier:
    """Return which machine sends the notices of a job that ``adder`` has added.

    ``present``: machines of the view, the longest in the cluster first. ``notifying``: those with a target
    for failures. A machine that is back sends again what happens from then on. If no other has a target, the
    adder sends after its return.
    """
    if adder in present:
        return ChosenNotifier(b"", f"{name(adder)}, which added the job, sends its notices")
    node = next((node for node in present if node in notifying), b"")
    if not node:
        return ChosenNotifier(b"", f"{name(adder)} sends its notices after its return: no other has a target")
    return ChosenNotifier(node, f"{name(node)} sends its notices while {name(adder)} is not here")
