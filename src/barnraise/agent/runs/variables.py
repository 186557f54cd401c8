"""Values of ``--set``: only in the memory of the machines of an active run, and sent on their links only.

The machine that starts a run has the values first. Every other machine of the run asks for them, and gets
them from any machine of the run that has them. Nothing is written to disk, so that they are gone when the
agents of all these machines have stopped.
"""

from __future__ import annotations

import asyncio
import logging

from barnraise.agent.context import AgentContext
from barnraise.agent.runs.messages import ValuesRequest, ValuesResponse, encode
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.core.errors import RunError
from barnraise.core.names import list_names
from barnraise.identity import NodeId
from barnraise.runs.variables import VariableValues

_PATIENCE_S = 60.0
_ANSWER_S = 5.0
_PAUSE_S = 0.5

_log = logging.getLogger(__name__)


class VariableKeeper:
    """Values of the active runs that this machine started or takes part in."""

    def __init__(
        self, context: AgentContext, registry: RunRegistry, *, patience_s: float = _PATIENCE_S
    ) -> None:
        self._context = context
        self._registry = registry
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, VariableValues] = {}
        self._waiting: dict[tuple[NodeId, str], asyncio.Future[VariableValues | None]] = {}

    def keep(self, run: str, values: VariableValues | None) -> None:
        """Hold the values of a run that starts here."""
        if values is not None:
            self._held[run] = values

    def drop(self, run: str) -> None:
        """Forget the values of a run that has ended."""
        self._held.pop(run, None)

    def clear(self) -> None:
        """Forget the values of all runs."""
        self._held.clear()

    async def values_of(self, entry: RunEntry) -> dict[str, str]:
        """Return the variables of a run; ask its other machines if this one does not have them.

        Raise RunError if none of them sends the values in time.
        """
        wanted = entry.spec.variables
        if not wanted.names:
            return {}
        deadline = self._loop.time() + self._patience_s
        while entry.run not in self._held:
            for node in self._holders(entry):
                values = await self._ask(node, entry.run)
                if values is not None and values.names == wanted:
                    self._held[entry.run] = values
                    break
                if values is not None:
                    _log.debug("%s sent values that run %s was not started with", node.short, entry.run)
            else:
                if self._loop.time() > deadline:
                    raise RunError(
                        f"no connected machine has the values of {list_names(wanted.names)} in its memory",
                        hint="They are never on a disk. Stop the run, and give them again: "
                        f"barnraise resume {entry.run} --set {wanted.names[0]}",
                    )
                await asyncio.sleep(_PAUSE_S)
        return dict(self._held[entry.run].values)

    def received(self, node: NodeId, message: ValuesRequest | ValuesResponse) -> None:
        """Answer a machine of the run, or deliver an answer. Others learn nothing."""
        if isinstance(message, ValuesResponse):
            future = self._waiting.get((node, message.run))
            if future is not None and not future.done():
                future.set_result(message.values)
            return
        entry = self._registry.runs.get(message.run)
        is_allowed = entry is not None and not entry.has_ended and node.raw in entry.spec.nodes
        values = self._held.get(message.run) if is_allowed else None
        self._context.send_bulk(node, encode(ValuesResponse(message.run, values)))

    def _holders(self, entry: RunEntry) -> list[NodeId]:
        """Return the connected machines that may have the values, the one that started the run first."""
        nodes = dict.fromkeys(map(NodeId, (entry.spec.by, *entry.spec.nodes)))
        linked = set(self._context.linked_nodes())
        return [node for node in nodes if node in linked and node != self._context.me]

    async def _ask(self, node: NodeId, run: str) -> VariableValues | None:
        future = self._waiting.setdefault((node, run), self._loop.create_future())
        self._context.send_bulk(node, encode(ValuesRequest(run)))
        try:
            return await asyncio.wait_for(asyncio.shield(future), _ANSWER_S)
        except TimeoutError:
            return None
        finally:
            self._waiting.pop((node, run), None)
