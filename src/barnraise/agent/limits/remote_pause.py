"""Pauses over the control links: an owner's machine pauses another owner's machine, or ends the pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from barnraise.agent.context import AgentContext
from barnraise.agent.limits import messages
from barnraise.agent.limits.messages import PauseAnswer, PauseOrder
from barnraise.core.errors import AgentError, ProtocolError
from barnraise.core.sanitize import printable
from barnraise.identity import NodeId

_ANSWER_S = 5.0
_MAX_SENTENCE = 1000


class RemotePause:
    """Orders that this agent sends and obeys. ``effects``: what a pause means for each run here, in words."""

    def __init__(self, context: AgentContext, effects: Callable[[], tuple[tuple[str, str], ...]]) -> None:
        self._context, self._effects = context, effects
        self._serial = 0
        self._waiting: dict[tuple[NodeId, int], asyncio.Future[PauseAnswer]] = {}

    async def order(self, node: NodeId, *, paused: bool, until: float = 0.0) -> str:
        """Pause a machine, or let runs use it again; return what was done, or raise AgentError."""
        context = self._context
        name = context.name_of(node)
        if node == context.me:
            return self._apply("", paused=paused, until=until)
        if context.log.role(node) != "owner":
            raise AgentError(
                f"{name} is a guest, and only its user can pause it",
                hint=f"Ask its user to run `barnraise {'pause' if paused else 'resume-machine'}` there.",
            )
        if context.connections.get(node) is None:
            raise AgentError(f"{name} is not connected to this machine", hint="See why: barnraise status")
        self._serial += 1
        key = (node, self._serial)
        future: asyncio.Future[PauseAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            order = PauseOrder(self._serial, paused, until)
            context.send_bulk(node, messages.encode(order))
            answer = await asyncio.wait_for(future, _ANSWER_S)
        except TimeoutError as error:
            raise AgentError(
                f"{name} did not answer within {_ANSWER_S:g} s", hint="See its state: barnraise status"
            ) from error
        finally:
            del self._waiting[key]
        if not answer.done:
            raise AgentError(f"{name} refuses: {printable(answer.sentence)}", hint="Do it on that machine.")
        return f"{name}: {printable(answer.sentence)}"

    def received(self, node: NodeId, body: memoryview) -> None:
        """Execute an order of another owner's machine, or take the answer to one of ours."""
        message = messages.decode(body)
        if isinstance(message, PauseOrder):
            self._context.send_bulk(node, messages.encode(self._obey(node, message)))
            return
        future = self._waiting.get((node, message.serial))
        if future is not None and not future.done():
            future.set_result(message)

    def _obey(self, node: NodeId, order: PauseOrder) -> PauseAnswer:
        log, name = self._context.log, self._context.name_of(node)
        if log.role(node) != "owner":
            raise ProtocolError(f"{node.short} is a guest and cannot pause other machines")
        if log.role(self._context.me) != "owner":
            return PauseAnswer(order.serial, False, "this machine is a guest, and only its user can pause it")
        try:
            sentence = self._apply(name, paused=order.paused, until=order.until)
        except OSError as error:
            sentence = f"the limits cannot be saved: {error.strerror or error}"
            return PauseAnswer(order.serial, False, sentence[:_MAX_SENTENCE])
        done = "paused this machine" if order.paused else "lets runs use this machine again"
        self._context.report_event(f"{name} {done}")
        self._context.audit.write("asked-by-owner", by=name, detail=done)
        return PauseAnswer(order.serial, True, sentence[:_MAX_SENTENCE])

    def _apply(self, by: str, *, paused: bool, until: float) -> str:
        """Change the limits of this machine. ``by``: the machine that asks; empty if it is this one."""
        service = self._context.limits
        service.set(
            replace(
                service.limits,
                paused=paused,
                paused_until=until if paused else 0.0,
                paused_by=by[:64] if paused else "",
            )
        )
        runs = "".join(f". Run {run} {words}" for run, words in (self._effects() if paused else ()))
        if paused:
            return f"it is paused{runs}"
        reason = service.shown_reason
        return f"runs of other machines do not use it yet: {reason}" if reason else "runs may use it again"
