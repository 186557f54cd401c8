"""Notification service of an agent: watches the runs that this machine started, and sends their notices."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from msgspec.structs import replace

from barnraise.agent.context import AgentContext
from barnraise.agent.notifications.changes import (
    ChangeFacts,
    FileFacts,
    files_note,
    names_of,
    notices_of,
    watched_part,
)
from barnraise.agent.notifications.delivery import LONGEST_S, RETRIES, Delivery, gives_up
from barnraise.agent.notifications.desktop import missing_program, show
from barnraise.agent.notifications.mail import send_mail
from barnraise.agent.notifications.notice import MAX_NAME, Notice, clean, with_progress
from barnraise.agent.notifications.outbox import KnownTarget, Outbox, WaitingNotice
from barnraise.agent.notifications.stall import StepPace, next_pace, no_news_reason, stall_reason
from barnraise.agent.notifications.web import post
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent_client.notifications.requests import TargetRow, TargetTestRow
from barnraise.agent_client.notifications.targets import (
    DesktopTarget,
    EmailTarget,
    EventName,
    Target,
    check_target,
)
from barnraise.core.errors import AgentError, BarnraiseError
from barnraise.core.flow.events import Wakeup
from barnraise.identity import NodeId
from barnraise.runs.control.worker_status import reported_states, training_progress

_POLL_S = 1.0
_LONGEST_POLL_S = 5.0  # more than this and the machine slept; the run did not stall meanwhile
_IDLE_S = 60.0
_SAVE_AGAIN_S = 10.0
_OPEN_AGAIN_S = 60.0
_STOP_S = 3.0
_MISSED_S = 7 * 86400.0  # an older attempt that is not known here is no news

_log = logging.getLogger(__name__)


class NotificationService:
    """Targets of this machine, the events of its own runs, and the delivery of notices."""

    def __init__(self, context: AgentContext, registry: RunRegistry) -> None:
        self._context, self._registry = context, registry
        self._loop = asyncio.get_running_loop()
        self._paces: dict[str, StepPace] = {}
        # What was last noticed of a run without new steps, and its step then.
        self._silences: dict[str, tuple[str, int | None]] = {}
        self._ended_at: dict[str, float] = {}  # of runs whose files are awaited
        self._due: dict[int, float] = {}  # when a notice is tried again, by its number
        self._attempts: dict[str, asyncio.Task[None]] = {}  # by target, one at a time
        self._changed = Wakeup()
        self._outbox: Outbox | None = None
        self._closed_because = "the agent is starting or stopping"
        self._is_stopping = False
        self._reported = ""  # the newest problem of the outbox that was reported

    def jobs(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """Return the background tasks that the agent has to run."""
        return self._watch, self._deliver, self._keep_saved

    def load(self) -> None:
        """Open the outbox of this machine. Runs work without it, so a fault is only reported."""
        try:
            self._outbox = Outbox(self._context.directory)
        except BarnraiseError as error:
            self._closed_because = error.message
        self._report_problem()
        if self.takes_failures:
            self._context.machine_changed()

    async def stop(self) -> None:
        """Wait a moment for deliveries, and close the outbox. The rest is sent after the next start."""
        self._is_stopping = True
        outbox, self._outbox = self._outbox, None
        if outbox is None:
            return
        if self._attempts:
            await asyncio.wait(self._attempts.values(), timeout=_STOP_S)
        for attempt in self._attempts.values():
            attempt.cancel()
        outbox.close()

    # the state of the outbox

    @property
    def has_targets(self) -> bool:
        """Tell whether this machine has a target."""
        return self._outbox is not None and self._outbox.has_targets

    @property
    def takes_failures(self) -> bool:
        """Tell whether a target of this machine takes notices of failures."""
        return self._outbox is not None and self._outbox.takes("failed")

    @property
    def problem(self) -> str:
        """Return what is wrong with the outbox; empty if all is saved."""
        if self._outbox is None:
            return f"no notifications are sent: {self._closed_because}"
        why = self._outbox.problem
        return f"notifications are sent, but a restart may lose or repeat them: {why}" if why else ""

    def _report_problem(self) -> None:
        """Report a change of the outbox's state, once."""
        problem = self.problem
        if bool(problem) != bool(self._reported):
            self._context.report_event(problem or "notifications are saved again")
        self._reported = problem

    async def _keep_saved(self) -> None:
        """Open the outbox if it could not be opened, and save what the disk did not take, until cancelled."""
        while not self._is_stopping:
            await asyncio.sleep(_OPEN_AGAIN_S if self._outbox is None else _SAVE_AGAIN_S)
            if self._outbox is not None:
                self._outbox.save_again()
                self._report_problem()
            elif not self._is_stopping:
                self.load()
                for entry in list(self._registry.runs.values()):
                    self.on_record(entry)
                self._changed.wake()

    # requests of the command line

    @property
    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            raise AgentError(f"notifications do not work now: {self._closed_because}")
        return self._outbox

    def table(self) -> tuple[TargetRow, ...]:
        """Return the targets as people see them."""
        return tuple(self._open_outbox.table())

    def add(self, target: Target, events: Sequence[EventName]) -> str:
        """Add a target and return its name; raise BarnraiseError if it cannot be used."""
        check_target(target)
        if isinstance(target, DesktopTarget) and (program := missing_program(sys.platform)):
            raise AgentError(
                f"this machine has no {program}, which shows notices on the desktop",
                hint="On Debian or Ubuntu: apt install libnotify-bin.",
            )
        # Also attempts that have ended: those that are not known now and are reported later, were missed.
        known = {
            entry.run: watched_part(entry.record)
            for entry in self._registry.runs.values()
            if entry.spec.job or (self._is_ours(entry) and not entry.has_ended)
        }
        name = self._open_outbox.add(target, events, known)
        self._context.machine_changed()
        return name

    def remove(self, name: str) -> None:
        """Remove a target; raise AgentError if there is none of this name."""
        self._open_outbox.remove(name)
        self._context.machine_changed()

    async def test(self, name: str | None) -> tuple[TargetTestRow, ...]:
        """Send a test notice to a target, or to all; raise AgentError if there is none."""
        chosen = [known for known in self._open_outbox.targets() if name in (None, known.name)]
        if not chosen:
            what = f"no target {name}" if name is not None else "no target"
            raise AgentError(f"there is {what}", hint="Add one: barnraise notify add TARGET")
        sender = clean(self._context.name_of(self._context.me), MAX_NAME)
        at = time.time()
        notice = Notice(
            event="test",
            key=f"test {at}",
            run="",
            state="test",
            reason=f"{sender} reaches you here",
            at=at,
            sender=sender,
        )
        results = await asyncio.gather(*(self._send(known.target, notice) for known in chosen))
        return tuple(
            TargetTestRow(known.name, known.target.masked, result.failure)
            for known, result in zip(chosen, results, strict=True)
        )

    # events

    def on_record(self, entry: RunEntry) -> None:
        """Queue the notices that a new version of a run calls for."""
        try:
            self._compare(entry)
        except BarnraiseError as error:
            _log.error("the notices of run %s are not queued: %s", entry.run, error.message)

    def _compare(self, entry: RunEntry) -> None:
        outbox, is_ours = self._outbox, self._is_ours(entry)
        # Any machine may be named for the notices of an attempt later, so it watches all attempts.
        if outbox is None or not outbox.has_targets or not (is_ours or entry.spec.job):
            return
        old, new = outbox.watched(entry.run), watched_part(entry.record)
        if old is None:
            # An attempt may begin and end while this agent is off.
            is_missed = bool(entry.spec.job) and time.time() - entry.spec.at < _MISSED_S
            if entry.has_ended and not is_missed:
                return  # it ended before there was a target, or was forgotten here
            outbox.keep_only(self._registry.runs)
            old = replace(new, phase="preparing", outcome=None) if entry.has_ended else new
        elif old == new:
            return
        files = self._files_note(entry) if is_ours and entry.has_ended else ""
        if files is None:
            return  # `_look_at_ends` compares it again
        self._ended_at.pop(entry.run, None)
        progress = training_progress(entry.record, entry.reports)
        changes = notices_of(old, new, self._facts(entry, files)) if is_ours else []
        if outbox.save(entry.run, new, [with_progress(notice, progress) for notice in changes]):
            self._changed.wake()
        self._report_problem()

    def _files_note(self, entry: RunEntry) -> str | None:
        """Return what is to be said of the files of a run that has ended; None if that is not known yet."""
        now = self._loop.time()
        since_s = now - self._ended_at.setdefault(entry.run, now)
        facts = FileFacts(since_s, self._context.member.view.nodes, self._name_of)
        return files_note(entry.record, entry.reports, facts)

    def _look_at_ends(self) -> None:
        """Compare the runs again that have ended, and whose files were not collected then."""
        for run in list(self._ended_at):
            entry = self._registry.runs.get(run)
            if entry is None or self._outbox is None or not self._outbox.has_targets:
                del self._ended_at[run]
            else:
                self.on_record(entry)

    def _facts(self, entry: RunEntry, files: str) -> ChangeFacts:
        member = self._context.member
        nodes = (*entry.spec.nodes, *entry.record.nodes)
        peers = {node: member.peers.get(node) for node in nodes}
        return ChangeFacts(
            run=entry.run,
            sender=self._context.name_of(self._context.me),
            at=time.time(),
            reports=entry.reports,
            present=set(member.view.nodes),
            leaving={node for node, peer in peers.items() if peer is not None and peer.leaving is not None},
            name=self._name_of,
            files=files,
        )

    def _is_ours(self, entry: RunEntry) -> bool:
        """Tell whether this machine sends the notices of the run: the starter, or another one that is named.

        It may have another key now.
        """
        by, log = NodeId(entry.record.notifier or entry.spec.by), self._context.log
        return self._context.me in (by, log.current(by))

    def _name_of(self, node: bytes) -> str:
        return self._context.name_of(NodeId(node))

    async def _watch(self) -> None:
        """Look for stalled runs at intervals, until cancelled."""
        seen_at = self._loop.time()
        while True:
            await asyncio.sleep(_POLL_S)
            now = self._loop.time()
            elapsed_s, seen_at = min(now - seen_at, _LONGEST_POLL_S), now
            try:
                self._look_at_ends()
                self._look(elapsed_s)
            except BarnraiseError as error:
                _log.error("stalled runs are not noticed: %s", error.message)

    def _look(self, elapsed_s: float) -> None:
        outbox = self._outbox
        if outbox is None or not outbox.has_targets:
            self._paces.clear()
            return
        active = {
            run: entry
            for run, entry in self._registry.runs.items()
            if entry.record.phase in ("running", "restarting") and self._is_ours(entry)
        }
        self._paces = {run: pace for run, pace in self._paces.items() if run in active}
        self._silences = {run: event for run, event in self._silences.items() if run in active}
        for run, entry in active.items():
            progress = training_progress(entry.record, entry.reports)
            at_end = progress is not None and progress.total is not None and progress.step >= progress.total
            if entry.record.finished or at_end or _is_paused(entry):
                continue
            step = progress.step if progress is not None else None
            reporters = _reporters(entry)
            is_heard = any(self._hears(node) for node in reporters)
            pace = self._paces[run] = next_pace(
                self._paces.get(run, StepPace()), step, elapsed_s, is_heard=is_heard
            )
            least_s = self._context.settings.notifications.stalled_s
            silence = stall_reason(pace, least_s, self._wait_reason(entry))
            no_news = no_news_reason(pace, least_s, names_of(reporters, self._name_of))
            event: Literal["stalled", "no-news"] = "no-news" if no_news else "stalled"
            if (silence or no_news) and self._silences.get(run) != (event, pace.step):
                self._silences[run] = event, pace.step
                notice = self._silence(entry, event, no_news or silence, pace.step)
                if outbox.save(run, None, [with_progress(notice, progress)]):
                    self._changed.wake()

    def _silence(
        self, entry: RunEntry, event: Literal["stalled", "no-news"], reason: str, step: int | None
    ) -> Notice:
        return Notice(
            event=event,
            key=f"{event} {step}",
            run=entry.run,
            state="stalled" if event == "stalled" else "unknown",
            reason=clean(reason),
            at=time.time(),
            sender=clean(self._name_of(self._context.me.raw), MAX_NAME),
            machines=names_of(entry.record.nodes, self._name_of),
        )

    def _hears(self, node: bytes) -> bool:
        """Tell whether news of a machine reaches this one now."""
        is_linked = NodeId(node) in self._context.linked_nodes()
        is_here = node == self._context.me.raw
        return is_here or (is_linked and node not in self._context.member.unreachable(self._loop.time()))

    def _wait_reason(self, entry: RunEntry) -> str:
        """Return what the workers wait for, as far as this machine knows."""
        states = reported_states(entry.reports)
        waits = (states[slot.key].wait_reason for slot in entry.record.slots if slot.key in states)
        reason = next((wait for wait in waits if wait), "")
        return reason or (entry.record.why if entry.record.phase == "restarting" else "")

    # delivery

    async def _deliver(self) -> None:
        """Send the notices that are due, one at a time to each target, until cancelled."""
        while True:
            wait_s = _IDLE_S
            try:
                wait_s = self._start_attempts()
            except BarnraiseError as error:
                _log.error("notices are not sent: %s", error.message)
            await self._changed.sleep(wait_s)

    def _start_attempts(self) -> float:
        """Start an attempt for each target that has a notice due; return the seconds until the next one."""
        outbox, wait_s, now = self._outbox, _IDLE_S, self._loop.time()
        if outbox is None or not outbox.has_targets:
            return wait_s
        waiting = outbox.waiting()
        self._due = {each.number: self._due.get(each.number, now) for each in waiting}
        targets = {known.name: known for known in outbox.targets()}
        for notice in waiting:
            if notice.target in self._attempts or notice.target not in targets:
                continue
            if self._due[notice.number] > now:
                wait_s = min(wait_s, self._due[notice.number] - now)
                continue
            attempt = self._loop.create_task(self._attempt(outbox, targets[notice.target], notice))
            self._attempts[notice.target] = attempt
        return wait_s

    async def _attempt(self, outbox: Outbox, known: KnownTarget, waiting: WaitingNotice) -> None:
        try:
            result = await self._send(known.target, waiting.notice)
            if not result.failure:
                outbox.note_delivered(waiting, time.time())
                return
            attempts = waiting.attempts + 1
            is_over = gives_up(result, attempts)
            outbox.note_failed(waiting, result.failure, time.time(), gives_up=is_over)
            self._due[waiting.number] = self._loop.time() + RETRIES.wait(attempts - 1)
            if is_over:
                self._context.report_event(
                    f"the notice {waiting.notice.title!r} is not sent to {known.name}: {result.failure}"
                )
        except BarnraiseError as error:
            _log.error("a notice for %s: %s", known.name, error.message)
            self._due[waiting.number] = self._loop.time() + _IDLE_S
        finally:
            del self._attempts[known.name]
            self._changed.wake()

    async def _send(self, target: Target, notice: Notice) -> Delivery:
        """Send a notice in a thread of its own, which cannot keep the agent from stopping."""
        future: asyncio.Future[Delivery] = self._loop.create_future()

        def settle(result: Delivery) -> None:
            if not future.done():
                future.set_result(result)

        def work() -> None:
            try:
                result = send(target, notice)
            except Exception as error:  # noqa: BLE001  # a notice must not stop the agent
                # Its text may quote a URL or a password.
                where = "".join(traceback.format_tb(error.__traceback__))
                _log.error("a notice could not be sent: %s\n%s", type(error).__name__, where)
                result = Delivery(f"an internal error: {type(error).__name__}", is_final=True)
            try:
                self._loop.call_soon_threadsafe(settle, result)
            except RuntimeError:  # the agent has stopped meanwhile
                pass

        threading.Thread(target=work, name="barnraise-notice", daemon=True).start()
        try:
            return await asyncio.wait_for(future, LONGEST_S)
        except TimeoutError:
            return Delivery(f"the target took longer than {LONGEST_S:g} s")


def send(target: Target, notice: Notice) -> Delivery:
    """Send a notice to a target, and wait for its answer."""
    if isinstance(target, DesktopTarget):
        return show(notice, sys.platform, os.environ)
    if isinstance(target, EmailTarget):
        return send_mail(target, notice)
    return post(target, notice)


def _reporters(entry: RunEntry) -> tuple[bytes, ...]:
    """Return the machines of which any would report the next step; only the main worker's, if it is known."""
    record = entry.record
    if record.phase == "running" and record.slots:
        return (record.slots[0].node,)
    return record.nodes or entry.spec.nodes


def _is_paused(entry: RunEntry) -> bool:
    """Tell whether the limits of their users keep all machines of a run from it now."""
    reports = [entry.reports.get(node) for node in entry.record.nodes]
    return bool(reports) and all(report is not None and report.paused for report in reports)
