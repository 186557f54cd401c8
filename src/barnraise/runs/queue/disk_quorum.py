"""Disk quorum: which jobs have their newest record on the disks of a quorum. Pure.

A record takes effect only then. Any quorum that is back after a power cut has a machine with that record, so
no machine goes on from an older one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from barnraise.membership.consensus.quorum import is_quorum
from barnraise.runs.queue.job import JobRecord, encode_job

DIGEST_BYTES = 16


def record_digest(record: JobRecord) -> bytes:
    """Return the hash by which machines compare their records of a job."""
    return hashlib.sha256(encode_job(record)).digest()[:DIGEST_BYTES]


@dataclass
class _Holders:
    digest: bytes
    nodes: set[bytes]
    others: dict[bytes, bytes] = field(default_factory=dict)  # by machine: what it has instead


class DiskQuorum:
    """Machines that have the newest known record of each job on disk. ``unsaved``: jobs without a quorum."""

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._voters: tuple[bytes, ...] = ()
        self._jobs: dict[int, _Holders] = {}
        self.unsaved: set[int] = set()

    def set_voters(self, voters: Sequence[bytes]) -> None:
        """Count these machines from now on, most senior first."""
        if tuple(voters) != self._voters:
            self._voters = tuple(voters)
            for number in self._jobs:
                self._update(number)

    def change(self, number: int, record: JobRecord) -> None:
        """Take a newer record, which so far is on the disk of this machine only."""
        self._jobs[number] = _Holders(record_digest(record), {self._me})
        self._update(number)

    def forget(self, number: int) -> None:
        """Remove a job that is no longer kept."""
        self._jobs.pop(number, None)
        self.unsaved.discard(number)

    def clear(self) -> None:
        """Remove all jobs of the old cluster."""
        self._jobs.clear()
        self.unsaved.clear()

    def digest(self, number: int) -> bytes:
        """Return the hash of the newest record of a job; empty if the job is not known."""
        holders = self._jobs.get(number)
        return holders.digest if holders is not None else b""

    def confirm(self, number: int, digest: bytes, node: bytes) -> bool:
        """Note which record a machine has on disk; return True if it is the newest one that is known."""
        holders = self._jobs.get(number)
        if holders is None or holders.digest != digest:
            return False
        holders.nodes.add(node)
        holders.others.pop(node, None)
        self._update(number)
        return True

    def missing(self, number: int) -> tuple[bytes, ...]:
        """Return the voters that have not confirmed the newest record of a job."""
        nodes = self._jobs[number].nodes if number in self._jobs else set()
        return tuple(node for node in self._voters if node not in nodes)

    def contradict(self, number: int, claim: bytes, node: bytes) -> bool:
        """Note that a machine has another job under this number, or another end of it: its ``claim``.

        Return True if a quorum has the same. Two machines may take one number after a power cut, or know two
        ends of a job. What a quorum has stays.
        """
        holders = self._jobs.get(number)
        if holders is None:
            return False
        holders.others[node] = hashlib.sha256(claim).digest()
        same = [other for other, held in holders.others.items() if held == holders.others[node]]
        return is_quorum(self._voters, same)

    def _update(self, number: int) -> None:
        if is_quorum(self._voters, self._jobs[number].nodes):
            self.unsaved.discard(number)
        else:
            self.unsaved.add(number)
