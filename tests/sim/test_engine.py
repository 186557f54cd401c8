"""Thousands of random runs of whole groups of engines, undisturbed and with every kind of fault.

Always: a result is right or the operation fails; it is reported once; its memory is left alone from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest

from barnraise.collectives.messages import OperationSpec
from tests.sim.engine_simulation import Machine, Simulation
from tests.sim.operations import ROOTED, Collective, Message, collective
from tests.sim.plans import Plan, random_items, random_plans

Scenario = Callable[[int], None]


@pytest.fixture
def run(
    request: pytest.FixtureRequest, seeds: Callable[[int], Iterable[int]]
) -> Callable[[Scenario, int], None]:
    """Run a scenario for many seeds; a failure says how to see it again."""

    def run_all(scenario: Scenario, usual: int) -> None:
        for seed in seeds(usual):
            try:
                scenario(seed)
            except BaseException as error:
                error.add_note(f"again: pytest tests/sim -k {request.node.name} --seed {seed}")
                raise

    return run_all


def simulation(seed: int, min_world: int = 2) -> Simulation:
    return Simulation(seed, min_world + seed % (7 - min_world))


def started(sim: Simulation, plans: list[Plan], *, measured: bool = False) -> None:
    for plan in plans:
        plan.launch(measured=measured)


def undisturbed(sim: Simulation, plan: Plan) -> None:
    """Every operation of the plan has finished on every rank."""
    for machine in plan.machines:
        handle = plan.handles[machine]
        assert handle.refused is None
        assert handle.tag is not None
        for call in handle.calls:
            assert call.ended is not None, f"{call.what} never ended"
            assert call.failure is None, f"{call.what}: {call.failure}"


def all_ended(sim: Simulation) -> None:
    for machine in sim.live:
        assert sim.pending(machine) == []
        assert not machine.requests, "a group that was neither opened nor refused"
    sim.check_memory()


def some_moment(sim: Simulation) -> None:
    """Stop in the middle: after a random number of events, most often while something is under way."""
    left = int(sim.random.expovariate(1 / 150))

    def reached() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    sim.settle(until=reached)


def rebuilt(sim: Simulation, generation: int) -> None:
    """Check that the remaining machines build a new group, and that it works."""
    machines = sim.live
    if len(machines) < 2:
        return
    plan = Plan(sim, f"after{generation}", machines, random_items(sim.random, len(machines), 3), generation)
    plan.launch()
    sim.settle()
    sim.advance(2.0)
    undisturbed(sim, plan)


def wait_for_a_rank_never_seen(sim: Simulation, plan: Plan, victim: Machine) -> None:
    """Wait for a rank without any link: only the group's own timeout can stop the wait."""
    sim.advance(62.0, step=1.9)
    all_ended(sim)
    for machine in sim.live:
        handle = plan.handles.get(machine)
        assert handle is None or handle.refused is not None


def check_lost(sim: Simulation, plan: Plan, victim: Machine) -> None:
    """Check that operations that needed the victim name the victim."""
    rank = plan.machines.index(victim)
    for machine in plan.machines:
        handle = plan.handles.get(machine)
        if machine is victim or handle is None:
            continue
        failures = [call.failure for call in handle.calls if call.failure is not None]
        for failure in [*failures, *([handle.refused] if handle.refused else [])]:
            assert failure is not None
            assert (failure.code, failure.peer) == ("peer-lost", rank), failure


def test_every_result_is_right(run: Callable[[Scenario, int], None]) -> None:
    def scenario(seed: int) -> None:
        sim = simulation(seed)
        plans = random_plans(sim)
        started(sim, plans, measured=sim.capacity > 10_000 and seed % 4 == 0)
        sim.settle()
        sim.advance(1.5)
        for plan in plans:
            undisturbed(sim, plan)
        all_ended(sim)
        for machine in sim.machines:
            for group in machine.engine._groups.values():
                assert not group.running
                assert not group.early
                assert not any(group.early_bytes.values())
                assert group.point_to_point.pending() == []
                assert group.point_to_point.offers == []

    run(scenario, 300)


def test_killed_rank_is_named_by_every_survivor(run: Callable[[Scenario, int], None]) -> None:
    def scenario(seed: int) -> None:
        sim = simulation(seed)
        plans = random_plans(sim)
        started(sim, plans)
        some_moment(sim)
        victim = sim.random.choice(sim.machines)
        met = bool(victim.links)
        sim.kill(victim)
        sim.settle()
        for plan in plans:
            if victim in plan.machines and not met:
                wait_for_a_rank_never_seen(sim, plan, victim)
                return
        all_ended(sim)  # the clock did not advance, so no operation timed out
        for plan in plans:
            if victim in plan.machines:
                check_lost(sim, plan, victim)
            else:
                undisturbed(sim, plan)
        rebuilt(sim, 2)
        all_ended(sim)

    run(scenario, 300)


def test_silent_rank_is_named_by_every_survivor(run: Callable[[Scenario, int], None]) -> None:
    def scenario(seed: int) -> None:
        sim = simulation(seed)
        plans = random_plans(sim)
        started(sim, plans)
        some_moment(sim)
        linked = len(sim.machines) - 1
        if any(len(machine.links) < linked for machine in sim.machines):
            sim.settle()
        victim = sim.random.choice(sim.machines)
        sim.freeze(victim)
        sim.settle()
        sim.advance(5.5)
        all_ended(sim)
        for plan in plans:
            if victim in plan.machines:
                check_lost(sim, plan, victim)
            else:
                undisturbed(sim, plan)
        rebuilt(sim, 2)
        all_ended(sim)

    run(scenario, 80)


def test_stale_generation_is_rejected(run: Callable[[Scenario, int], None]) -> None:
    def scenario(seed: int) -> None:
        sim = simulation(seed)
        machines = sim.machines
        sleeper = sim.random.choice(machines)
        others = [machine for machine in machines if machine is not sleeper]
        first = Plan(sim, "all", machines, random_items(sim.random, len(machines), 3))
        first.launch()
        some_moment(sim)
        sim.settle()
        if len(others) > 1:
            Plan(sim, "new", others, random_items(sim.random, len(others), 3), 2).launch()
            sim.settle()
            for machine in others:
                handle = machine.open("late", others, 1, None)
                assert handle.refused is not None
                assert "start 1 of the run is over" in handle.refused.message
            # a machine that missed the new generation opens a group of the old one
            handle = sleeper.open("old", machines, 1, None)
            sim.settle()
            assert handle.refused is not None
            assert handle.refused.code == "operation-aborted"
        all_ended(sim)

    run(scenario, 80)


def other_specification(operation: Collective) -> OperationSpec:
    """Something else that a rank might call by mistake."""
    was = operation.specification
    if was.kind == "all_reduce":
        return OperationSpec("all_reduce", was.dtype, was.reduction, -1, "star", (44,), 4096, 2)
    return OperationSpec("all_reduce", 8, "sum", -1, "star", (44,), 4096, 2)


def test_mismatched_calls_are_reported_on_every_rank(
    run: Callable[[Scenario, int], None],
) -> None:
    def scenario(seed: int) -> None:
        sim = simulation(seed)
        world = len(sim.machines)
        items = random_items(sim.random, world, 3)
        plan = Plan(sim, "all", sim.machines, items)
        plan.launch()
        sim.settle()
        wrong = sim.random.randrange(world)
        sequence = sum(isinstance(item, Collective) for item in items)
        right = collective(sim.random, world)
        sizes = [*right.specification.sizes]
        for sends, receives in right.splits or ():
            sizes += sends + receives
        if right.specification.kind in ROOTED or 0 in sizes:
            return  # one-sided: some ranks may rightly finish before they can know
        other = Collective(
            other_specification(right),
            tuple(bytes(44) for _ in range(world)),
            ((),) * world,
        )
        for machine in sim.machines:
            handle = plan.handles[machine]
            called = other if handle.rank == wrong else right
            sim.give(machine, handle, [partial(machine.start, handle, sequence, called)])
        sim.settle()
        sim.advance(2.5)
        all_ended(sim)
        for machine in sim.machines:
            call = plan.handles[machine].calls[-1]
            assert call.failure is not None, f"{call.what} finished"
            assert call.failure.code == "operation-mismatch"
            assert f"rank {wrong}" in call.failure.message
            assert other.specification.describe() in call.failure.message
            assert right.specification.describe() in call.failure.message

    run(scenario, 250)


def test_operation_timeout_names_the_late_rank(run: Callable[[Scenario, int], None]) -> None:
    def scenario(seed: int) -> None:
        sim = simulation(seed)
        world = len(sim.machines)
        plan = Plan(sim, "all", sim.machines, random_items(sim.random, world, 3))
        plan.launch()
        sim.settle()
        late = sim.random.randrange(world)
        sequence = sum(isinstance(item, Collective) for item in plan.items)
        operation = collective(sim.random, world)
        calls = [
            machine.start(plan.handles[machine], sequence, operation, timeout_s=30.0)
            for machine in sim.machines
            if plan.handles[machine].rank != late
        ]
        sim.settle()
        sim.advance(31.0, step=0.5)
        all_ended(sim)
        for call in calls:
            if call.failure is not None:
                assert call.failure.code == "operation-timeout"
                assert call.failure.late == (late,)
                assert f"rank {late} alive but late" in call.failure.message

    run(scenario, 30)


def test_rank_far_ahead_is_not_reported_late() -> None:
    """It called the operation long ago, more operations back than it remembers in full."""
    sim = Simulation(1, 3)
    plan = Plan(sim, "all", sim.machines, [])
    plan.launch()
    sim.settle()
    specification = OperationSpec("broadcast", 6, "", 0, "ring", (8,), 4096, 2)
    operation = Collective(specification, (bytes(8),) * 3, ((),) * 3)
    first, _, last = sim.machines
    for sequence in range(100):
        first.start(plan.handles[first], sequence, operation)
    waiting = last.start(plan.handles[last], 0, operation, timeout_s=5.0)
    sim.advance(6.0)
    assert waiting.failure is not None
    assert waiting.failure.late == (1,)


@pytest.mark.slow
def test_abort_ends_all_operations_on_every_rank(run: Callable[[Scenario, int], None]) -> None:
    def scenario(seed: int) -> None:
        sim = simulation(seed)
        plan = Plan(sim, "all", sim.machines, random_items(sim.random, len(sim.machines), 6))
        plan.launch()
        some_moment(sim)
        victim = sim.random.choice(sim.machines)
        handle = plan.handles.get(victim)
        if handle is None or handle.tag is None:
            return
        rank = handle.rank
        victim.abort(handle)
        assert sim.pending(victim) == []
        sim.settle()
        all_ended(sim)
        for machine in sim.machines:
            for call in plan.handles[machine].calls:
                if call.failure is not None:
                    own = machine is victim
                    assert call.failure.code == ("operation-aborted" if own else "peer-lost")
                    assert own or call.failure.peer == rank
        rebuilt(sim, 1)
        all_ended(sim)

    run(scenario, 180)


@pytest.mark.slow
def test_rank_may_close_after_its_own_part(run: Callable[[Scenario, int], None]) -> None:
    def scenario(seed: int) -> None:
        sim = simulation(seed)
        world = len(sim.machines)
        plan = Plan(sim, "all", sim.machines, random_items(sim.random, world, 5))
        plan.launch()

        def closer(machine: Machine) -> Callable[[], bool]:
            def action() -> bool:
                handle = plan.handles.get(machine)
                if handle is None or handle.tag is None:
                    return False
                expected = sum(
                    isinstance(item, Collective) or handle.rank in (item.source, item.destination)
                    for item in plan.items
                )
                if len(handle.calls) < expected or sim.pending(machine):
                    return False
                machine.close(handle)
                return True

            return action

        for machine in sim.machines:
            sim.actions.append((machine, closer(machine)))
        sim.settle()
        sim.advance(3.0)
        undisturbed(sim, plan)
        all_ended(sim)
        for machine in sim.machines:
            assert machine.engine._groups == {}

    run(scenario, 150)


def test_closing_too_early_is_an_abort_here_and_a_loss_there(run: Callable[[Scenario, int], None]) -> None:
    def scenario(seed: int) -> None:
        sim = simulation(seed)
        plan = Plan(sim, "all", sim.machines, random_items(sim.random, len(sim.machines), 6))
        plan.launch()
        some_moment(sim)
        leaver = sim.random.choice(sim.machines)
        handle = plan.handles.get(leaver)
        if handle is None or handle.tag is None:
            return
        leaver.close(handle)
        for call in handle.calls:
            assert call.failure is None or call.failure.code == "operation-aborted"
        sim.settle()
        sim.advance(3.0)
        all_ended(sim)
        check_lost(sim, plan, leaver)

    run(scenario, 200)


@pytest.mark.slow
def test_messages_under_one_tag_keep_their_order(run: Callable[[Scenario, int], None]) -> None:
    """Also when some are small enough to be sent unasked, and more than may wait unasked."""

    def scenario(seed: int) -> None:
        sim = simulation(seed)
        size = sim.random.choice((8, 16, 16 << 10, 20_000))
        items: list[Collective | Message] = []
        for number in range(sim.random.randrange(34, 80)):
            length = size if sim.random.random() < 0.9 else 17_000
            items.append(Message(0, 1, 5, 6, bytes([number + 1]) * length))
        for _ in range(3):  # something large beside them, for control frames to pass
            items.insert(sim.random.randrange(20), collective(sim.random, len(sim.machines)))
        plan = Plan(sim, "all", sim.machines, items)
        plan.launch()
        sim.settle()
        undisturbed(sim, plan)
        all_ended(sim)

    run(scenario, 30)
