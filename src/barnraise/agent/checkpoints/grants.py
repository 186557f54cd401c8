"""What other machines may fetch from this one for a while: checkpoints, and what a run was started with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from barnraise.agent.artifact_service import ArtifactService
from barnraise.agent.checkpoints.local_store import LocalCheckpoints
from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeId

_LOAN_S = 3600.0

_log = logging.getLogger(__name__)


@dataclass
class _Grant:
    """Of one list of files; with step 0 what a run was started with."""

    run: str
    step: int
    until: dict[NodeId, float] = field(default_factory=dict)  # by whom it was asked for


class ReadGrants:
    """``on_files`` is called when others may have what a run was started with, or may not any more."""

    def __init__(
        self, shelf: LocalCheckpoints, shipper: ArtifactService, on_files: Callable[[str], None]
    ) -> None:
        self._shelf = shelf
        self._shipper = shipper
        self._on_files = on_files
        self._loop = asyncio.get_running_loop()
        self._changing = asyncio.Lock()  # what is lent is not taken back at the same moment
        self._loans: dict[bytes, _Grant] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._loans

    def borrowers(self, name: bytes) -> Collection[NodeId]:
        loan = self._loans.get(name)
        return loan.until if loan is not None else ()

    async def lend(self, node: NodeId, run: str, step: int, may_sign: Collection[bytes]) -> bytes:
        """The list of a checkpoint's files; a BarnraiseError if it is not whole."""
        async with self._changing:
            lent = [name for name, one in self._loans.items() if (one.run, one.step) == (run, step)]
            if not lent:
                packed = await asyncio.to_thread(self._shelf.lend, run, step, may_sign)
                lent = [packed.id]
            (name,) = lent
            self._note(name, run, step, node)
            self._shipper.allow(name, self._loans[name].until)
        return name

    def lend_files(self, node: NodeId, run: str, names: Iterable[bytes]) -> None:
        for name in names:
            self._note(name, run, 0, node)
        self._on_files(run)

    def returned(self, node: NodeId, run: str) -> None:
        """It needs nothing of that run any more."""
        for loan in self._loans.values():
            if loan.run == run:
                loan.until.pop(node, None)

    async def end_overdue(self) -> None:
        now = self._loop.time()
        for loan in self._loans.values():
            loan.until = {node: until for node, until in loan.until.items() if until > now}
        async with self._changing:
            for name, loan in [one for one in self._loans.items() if not one[1].until]:
                del self._loans[name]
                if loan.step:
                    self._shipper.withdraw(name)
                    try:
                        await asyncio.to_thread(self._shelf.take_back, name)
                    except (BarnraiseError, OSError) as error:
                        _log.warning("what was lent stays in the store: %s", error)
                else:
                    self._on_files(loan.run)

    def _note(self, name: bytes, run: str, step: int, node: NodeId) -> None:
        loan = self._loans.setdefault(name, _Grant(run, step))
        loan.until[node] = self._loop.time() + _LOAN_S
