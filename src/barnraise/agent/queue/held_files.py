"""Knowledge of the files of jobs that each machine has, from messages. It is never on a disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from barnraise.runs.queue.job import KnownJob


class HeldFiles:
    """Table of the manifests whose files are all on a machine, for each machine.

    ``own``: those of this machine; None before it has looked.
    """

    def __init__(self) -> None:
        self.own: frozenset[bytes] | None = None
        self._others: dict[bytes, frozenset[bytes]] = {}

    def note(self, node: bytes, manifests: Collection[bytes]) -> None:
        """Note what another machine has now."""
        self._others[node] = frozenset(manifests)

    def has(self, node: bytes, manifest: bytes) -> bool:
        """Tell whether another machine has all files of a manifest."""
        return manifest in self._others.get(node, ())

    def keep_only(self, nodes: Collection[bytes]) -> None:
        """Forget machines that are not among these."""
        self._others = {node: held for node, held in self._others.items() if node in nodes}

    def clear(self) -> None:
        """Forget everything of the old cluster."""
        self.own = None
        self._others.clear()

    def absent(
        self, jobs: Iterable[KnownJob], me: bytes, present: Collection[bytes]
    ) -> dict[int, tuple[bytes, ...]]:
        """Return the waiting jobs with files that no present machine has, and the machines that have them.

        The machine that added a job has its files. One that has all of them gives them to the others.
        """
        absent: dict[int, tuple[bytes, ...]] = {}
        held = {**self._others, me: self.own or frozenset()}
        for job in jobs:
            by = job.spec.by
            if job.record.state != "waiting" or by in present:
                continue
            for manifest in job.spec.program.manifests:
                others = (node for node, manifests in held.items() if manifest in manifests)
                holders = tuple(dict.fromkeys((by, *others)))
                if not any(node in present for node in holders):
                    absent[job.number] = holders
                    break
        return absent
