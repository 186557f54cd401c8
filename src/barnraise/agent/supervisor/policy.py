"""The supervisor's policy: which event leads to SIGTERM, a kill or a report. Pure."""

from __future__ import annotations

import msgspec

from barnraise.agent.supervisor.messages import Stop, SupervisorNote, WorkerExited, WorkerStarted

STUCK_S = 10.0


class InputEnded(msgspec.Struct, frozen=True):
    """The agent is gone, or the system stops this process."""


class TimePassed(msgspec.Struct, frozen=True):
    """A deadline may have passed."""


class SendTerminate(msgspec.Struct, frozen=True):
    """Effect: send SIGTERM to these workers."""

    ranks: tuple[int, ...]


class SendKill(msgspec.Struct, frozen=True):
    """Effect: kill these workers."""

    ranks: tuple[int, ...]


class Supervision(msgspec.Struct, frozen=True):
    """State of the supervised workers and the pending deadlines."""

    running: frozenset[int]
    grace_s: float
    kill_at: float | None = None  # when to kill workers that got SIGTERM
    stuck_at: float | None = None  # when killed workers should be gone


PolicyEvent = WorkerStarted | WorkerExited | SupervisorNote | Stop | InputEnded | TimePassed
Effect = SendTerminate | SendKill | WorkerStarted | WorkerExited | SupervisorNote


def decide(state: Supervision, event: PolicyEvent, now: float) -> tuple[Supervision, tuple[Effect, ...]]:
    """Return the next state and effects of an event.

    The exit of one worker is only reported: the agent decides whether the others continue.
    """
    match event:
        case WorkerStarted(rank=rank):
            return msgspec.structs.replace(state, running=state.running | {rank}), (event,)
        case WorkerExited(rank=rank):
            return msgspec.structs.replace(state, running=state.running - {rank}), (event,)
        case SupervisorNote():
            return state, (event,)
        case Stop(ranks=ranks) if ranks:
            return state, (SendKill(tuple(sorted(state.running & set(ranks)))),)
        case Stop(hard=True) | InputEnded():
            return _kill(state, now)
        case Stop():
            if state.kill_at is not None or state.stuck_at is not None:
                return state, ()
            stopping = msgspec.structs.replace(state, kill_at=now + state.grace_s)
            return stopping, (SendTerminate(tuple(sorted(state.running))),)
        case TimePassed():
            return _check_deadlines(state, now)


def next_deadline(state: Supervision) -> float | None:
    """Return when the state has to be checked next, or None."""
    return state.kill_at if state.kill_at is not None else state.stuck_at


def _kill(state: Supervision, now: float) -> tuple[Supervision, tuple[Effect, ...]]:
    killed = msgspec.structs.replace(state, kill_at=None, stuck_at=now + STUCK_S)
    return killed, (SendKill(tuple(sorted(state.running))),)


def _check_deadlines(state: Supervision, now: float) -> tuple[Supervision, tuple[Effect, ...]]:
    if state.kill_at is not None and now >= state.kill_at:
        killed, effects = _kill(state, now)
        late = tuple(SupervisorNote(_killed_note(rank, state.grace_s)) for rank in sorted(state.running))
        return killed, (*effects, *late)
    if state.stuck_at is not None and now >= state.stuck_at:
        held = tuple(SupervisorNote(_stuck_note(rank)) for rank in sorted(state.running))
        return msgspec.structs.replace(state, stuck_at=float("inf")), held
    return state, ()


def _killed_note(rank: int, grace_s: float) -> str:
    return f"rank {rank} did not exit within {grace_s:g} s of SIGTERM and was killed"


def _stuck_note(rank: int) -> str:
    return (
        f"rank {rank} was killed {STUCK_S:g} s ago and is still there: a driver or a network disk blocks it; "
        "restart the machine if it does not go away"
    )
