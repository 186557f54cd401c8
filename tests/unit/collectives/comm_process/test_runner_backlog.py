"""Limits of early messages: an honest rank never exceeds them, and no message is lost."""

from __future__ import annotations

import pytest

from barnraise.collectives.comm_process import group as group_module
from barnraise.collectives.comm_process.runner import _POOLED_BYTES, Runner
from barnraise.collectives.messages import OperationSpec
from tests.sim.engine_simulation import GroupHandle, Machine, Simulation
from tests.sim.operations import Collective, Message
from tests.sim.plans import Plan


def opened(world: int, seed: int = 1) -> tuple[Simulation, list[tuple[Machine, GroupHandle]]]:
    sim = Simulation(seed, world)
    plan = Plan(sim, "all", sim.machines, [])
    plan.launch()
    sim.settle()
    return sim, [(machine, plan.handles[machine]) for machine in sim.machines]


def broadcast(size: int, segment: int, world: int) -> Collective:
    specification = OperationSpec("broadcast", 6, "", 0, "star", (size,), segment, 2)
    data = bytes(range(1, 251)) * (size // 250)
    data += bytes(size - len(data))
    return Collective(specification, (data,) + (bytes(size),) * (world - 1), (((0, data),),) * world)


@pytest.mark.parametrize("segment", [1000, 16 << 10])
def test_root_far_ahead_keeps_its_links(segment: int) -> None:
    """60 broadcasts of 200 KB in pieces that may be sent ahead: far more than the others may have waiting."""
    sim, sides = opened(3)
    operation = broadcast(200_000, segment, 3)
    machine, side = sides[0]
    for sequence in range(60):
        machine.start(side, sequence, operation)
        if sequence % 10 == 0:
            sim.settle()
    sim.settle()
    for other, _ in sides[1:]:
        assert all(link.closed is None for link in other.links)
        state = next(iter(other.engine._groups.values()))
        held = sum(len(payload) for early in state.early.values() for _, payload in early.messages)
        assert 0 < held <= group_module._MAX_EARLY_BYTES
    for other, theirs in sides[1:]:
        for sequence in reversed(range(60)):
            other.start(theirs, sequence, operation)
    sim.settle()
    for other, theirs in sides:
        assert sim.pending(other) == []
        assert all(call.failure is None for call in theirs.calls)
        state = next(iter(other.engine._groups.values()))
        assert not state.early
        assert not state.early_sent
        assert not any(state.early_sent_bytes.values())
        assert not any(state.early_bytes.values())
        assert not any(state.early_start_bytes.values())


def test_small_messages_before_any_receive_are_delivered() -> None:
    sim, sides = opened(2)
    (sender, out), (receiver, into) = sides
    messages = [Message(0, 1, 3, 6, bytes([number]) * 50) for number in range(200)]
    for message in messages:
        sender.send(out, message)
    sim.settle()
    state = next(iter(receiver.engine._groups.values()))
    assert sum(offer.data is not None for offer in state.point_to_point.offers) == 32
    for message in messages:
        receiver.receive(into, message)
    sim.settle()
    assert sim.pending(sender) == sim.pending(receiver) == []
    assert not any(state.point_to_point.eager_in.values())


def test_message_sent_before_leave_is_received() -> None:
    """Send, reduce to a root, close, exit: a slower rank gets it all."""
    sim, sides = opened(2)
    (leaver, out), (slow, into) = sides
    message = Message(0, 1, 3, 6, b"good bye")
    operation = broadcast(500, 1000, 2)
    leaver.send(out, message)
    leaver.start(out, 0, operation)
    sim.settle()
    assert sim.pending(leaver) == []
    leaver.close(out)
    sim.settle()
    sim.kill(leaver)
    sim.settle()
    calls = [slow.start(into, 0, operation), slow.receive(into, message)]
    assert all(call.ended is not None and call.failure is None for call in calls)
    late = slow.start(into, 1, operation)
    assert late.failure is not None
    assert (late.failure.code, late.failure.peer) == ("peer-lost", 0)


@pytest.mark.parametrize("any_source", [False, True])
def test_receive_from_left_rank_fails_at_once(any_source: bool) -> None:
    sim, sides = opened(2)
    (leaver, out), (other, into) = sides
    waiting = other.receive(into, Message(0, 1, 3, 6, b"never", any_source))
    leaver.close(out)
    sim.settle()
    assert waiting.failure is not None
    assert (waiting.failure.code, waiting.failure.peer) == ("peer-lost", 0)


def test_send_to_disconnected_rank_fails() -> None:
    sim, sides = opened(2)
    (leaver, out), (other, into) = sides
    leaver.close(out)
    leaver.links[0].flush()
    assert other.links[0]._inbox
    call = other.send(into, Message(1, 0, 3, 6, b"unasked"))  # queued, not written
    other.links[0].receive()
    sim.kill(leaver)
    sim.settle()
    assert call.failure is not None
    assert (call.failure.code, call.failure.peer) == ("peer-lost", 0)


@pytest.mark.parametrize(("any_source", "late"), [(False, (0,)), (True, ())])
def test_receive_without_partner_times_out(any_source: bool, late: tuple[int, ...]) -> None:
    sim, sides = opened(2)
    other, into = sides[1]
    waiting = other.receive(into, Message(0, 1, 3, 6, b"never", any_source), timeout_s=3.0)
    sim.advance(2.5)
    assert waiting.ended is None
    sim.advance(1.0)
    assert waiting.failure is not None
    assert (waiting.failure.code, waiting.failure.late) == ("operation-timeout", late)


def test_group_that_never_opened_is_removed() -> None:
    sim = Simulation(3, 2)
    first = sim.machines[0]
    for number in range(5):
        first.open(f"group{number}", sim.machines, 1, None)
    sim.kill(sim.machines[1])
    sim.advance(130.0, step=1.0)
    assert not first.requests
    assert first.engine._groups == {}


def test_buffer_pool_size_is_bounded() -> None:
    runner = Runner(None, None)  # type: ignore[arg-type]
    for length in range(1, 3000):
        runner._recycle([memoryview(bytearray(length * 50)) for _ in range(3)])
    pooled = sum(len(buffer) for pool in runner._buffers.values() for buffer in pool)
    assert pooled == runner._pooled_bytes <= _POOLED_BYTES
