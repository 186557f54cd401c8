"""Rivals of a split model and their prices: fewer machines, one alone, offload, and sharded parameters. Pure.

Each rival gets the assumptions that favour it: reading and sending overlap with computing, and micro-batches
are computed together as far as memory allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Literal, NamedTuple

from barnraise.core.errors import RunError
from barnraise.core.units import format_duration, format_size
from barnraise.planning.plan.plans import listed
from barnraise.planning.split.placement import place_stages, predict_placement
from barnraise.planning.split.replica_placement import place_pipelines, predict_pipelines
from barnraise.planning.split.split_problem import SplitProblem
from barnraise.planning.split.stage_placement import ModelParts, StagePlacement
from barnraise.planning.split.stage_time import LinkRates, SplitStepTime

# Bytes per second, where nothing was measured: 16 lanes of PCIe 4, and an SSD.
HOST_RATE = 20e9
DISK_RATE = 3e9
_STATE = 4  # a trained value, its gradient and both moments of Adam
_BUFFERS = 2  # blocks that are read while another one is computed
_INSIDE = 20  # tensors of the boundary's size that a block takes while it is computed
_HOST_SHARE = 0.9  # of a computer's memory
_MOST_SEARCHED = 6  # machines of which all groups and rings are tried
_SIMPLER = 1.1  # a machine alone is preferred if it takes less than this times the split

RivalKind = Literal["fewer", "alone", "memory", "disk", "sharded"]


class SplitPrice(NamedTuple):
    """Split over some machines, in one pipeline, or with full replicas in several.

    ``shares``: micro-batches of each pipeline. ``why_spare``: sentences about machines without blocks.
    """

    pipelines: tuple[StagePlacement, ...]
    shares: tuple[int, ...]
    step: SplitStepTime
    why_spare: tuple[str, ...] = ()

    @property
    def machines(self) -> tuple[int, ...]:
        """Return the number of the machine of each stage."""
        return tuple(number for pipeline in self.pipelines for number in pipeline.order)


class Rival(NamedTuple):
    """Another way to train the same steps. ``step_s``: None if it is impossible; ``why``: a sentence."""

    name: str
    kind: RivalKind
    step_s: float | None
    why: str


def price_split(problem: SplitProblem, machines: Sequence[int]) -> SplitPrice:
    """Return the best pipeline on these machines, or on some of them, and its step.

    Raise RunError if the model does not fit, or if no speed is known.
    """
    own = problem.only(machines)
    placement = place_stages(own)
    _check_speeds(problem)
    step = predict_placement(own, placement.order, placement.runs)
    order = tuple(machines[place] for place in placement.order)
    return SplitPrice((placement._replace(order=order),), (problem.batches,), step, placement.why_spare)


def price_run(problem: SplitProblem) -> SplitPrice:
    """Return what a run on all machines does, and its step. Raise RunError as `price_split` does."""
    placement = place_pipelines(problem)
    _check_speeds(problem)
    shares = tuple(map(len, placement.divide(problem.batches)))
    step = predict_pipelines(problem, placement)
    return SplitPrice(placement.pipelines, shares, step, placement.why_spare)


def _check_speeds(problem: SplitProblem) -> None:
    if not problem.speeds:
        raise RunError(
            "no machine has measured a block, so no step can be predicted",
            hint="Read the output of the workers: barnraise logs RUN --all",
        )


def price_rivals(problem: SplitProblem) -> tuple[Rival, ...]:
    """Return the best rival of each kind; one that is impossible says why."""
    if not problem.speeds:
        return ()
    numbers = range(len(problem.machines))
    alone = _best([_alone(problem, number) for number in numbers])
    rivals = [*_fewer(problem), alone]
    for kind in ("memory", "disk"):
        if kind == "disk" or any(machine.host_bytes for machine in problem.machines):
            offloaded = _best([_offloaded(problem, number, kind) for number in numbers])
            is_faster = offloaded.step_s is not None and offloaded.step_s < (alone.step_s or 0.0)
            if alone.step_s is None or is_faster:
                rivals.append(offloaded)
    if len(problem.machines) > 1:
        rivals.append(_sharded(problem))
    return tuple(rivals)


def recommend(split: SplitPrice | None, rivals: Sequence[Rival]) -> str:
    """Return the best way in words; ``split``: None if the model does not fit on all machines."""
    possible = sorted(
        ((rival.step_s, rival) for rival in rivals if rival.step_s is not None), key=lambda pair: pair[0]
    )
    if not possible and split is None:
        return "The model fits on none of these machines, nor on all of them together."
    if not possible and split is not None:
        return (
            f"The split is the only way on these machines: {format_duration(split.step.step_s)} for a step."
        )
    seconds, best = possible[0]
    if split is None:
        rest = "A split over all machines is not possible here."
        return f"{rest} {_capital(best.name)} would take {format_duration(seconds)} for a step."
    split_s = split.step.step_s
    if len(split.machines) == 1 and best.kind == "alone":
        takes = f"{best.name} takes {format_duration(seconds)} for a step"
        return f"A split is not the right choice here: {takes}, so the others get no blocks."
    near_s = _SIMPLER * min(seconds, split_s)
    simple = [pair for pair in possible if pair[1].kind in ("alone", "fewer") and pair[0] <= near_s]
    simple.sort(key=lambda pair: pair[1].kind)  # one machine alone is the simplest
    if not simple and split_s <= seconds:
        return (
            f"The split is the right choice: {format_duration(split_s)} for a step. The next best, "
            f"{best.name}, would take {format_duration(seconds)}, {seconds / split_s:.1f} times as long."
        )
    seconds, best = simple[0] if simple else possible[0]
    figures = f"{format_duration(seconds)} for a step, and the split {format_duration(split_s)}"
    simpler = ". It is simpler" if simple and seconds >= split_s else ""
    if best.kind == "fewer":
        return f"Leave machines out: {best.name} takes {figures}{simpler}."
    return f"A split is not the right choice here: {best.name} takes {figures}{simpler}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _best(rivals: Sequence[Rival]) -> Rival:
    """Return the fastest one; the first one if all are impossible."""
    return min(rivals, key=lambda rival: float("inf") if rival.step_s is None else rival.step_s)


def _whole(problem: SplitProblem, number: int) -> tuple[float, float]:
    """Return the seconds of both passes of a micro-batch through the whole model."""
    count = len(problem.parts.blocks)
    return problem.speeds[number].passes(0, count, count)


def _frozen(parts: ModelParts) -> int:
    every = (parts.before, *parts.blocks, parts.after)
    return sum(part.frozen_bytes for part in every) - parts.tied_bytes


def _trained(parts: ModelParts) -> int:
    return sum(part.trained_bytes for part in (parts.before, *parts.blocks, parts.after))


def _largest(parts: ModelParts) -> int:
    return max(part.frozen_bytes for part in (parts.before, *parts.blocks, parts.after))


def _kept_bytes(parts: ModelParts) -> int:
    """Return the memory of a micro-batch on a machine that has all blocks."""
    known = sum(part.activation_bytes for part in parts.blocks)
    return (known or len(parts.blocks) * parts.boundary_bytes) + _INSIDE * parts.boundary_bytes


def _alone(problem: SplitProblem, number: int) -> Rival:
    machine = problem.machines[number]
    need = problem.whole_bytes
    name = f"{machine.name} alone"
    if machine.memory_bytes and need > machine.memory_bytes:
        sizes = f"it needs {format_size(need)} of memory and has {format_size(machine.memory_bytes)}"
        return Rival(name, "alone", None, sizes)
    return Rival(name, "alone", problem.batches * sum(_whole(problem, number)), "it sends nothing")


def _offloaded(problem: SplitProblem, number: int, kind: RivalKind) -> Rival:
    """Return a machine alone that reads frozen weights for each pass; those that fit stay on the device."""
    machine, parts = problem.machines[number], problem.parts
    where = "in its computer's memory" if kind == "memory" else "on its disk"
    name = f"{machine.name} alone, with weights {where}"
    measured, assumed = (machine.host_rate, HOST_RATE) if kind == "memory" else (machine.disk_rate, DISK_RATE)
    rate, source = (measured, "measured") if measured else (assumed, "assumed")
    if kind == "memory" and not machine.host_bytes:
        return Rival(name, kind, None, "its device uses the computer's memory")
    forward_s, backward_s = _whole(problem, number)
    frozen = _frozen(parts)
    fixed = _STATE * _trained(parts) + _BUFFERS * _largest(parts)
    best: tuple[float, int, int] | None = None
    for together in range(1, problem.batches + 1):
        room = machine.memory_bytes - fixed - together * _kept_bytes(parts)
        if machine.memory_bytes and room < 0:
            break
        read = max(0, frozen - room) if machine.memory_bytes else frozen
        if kind == "memory" and read > _HOST_SHARE * machine.host_bytes:
            continue
        passes = -(-problem.batches // together)
        read_s = read / rate
        seconds = passes * (max(together * forward_s, read_s) + max(together * backward_s, read_s))
        if best is None or seconds < best[0]:
            best = (seconds, passes, read)
    if best is None:
        return Rival(name, kind, None, "it has too little memory for that")
    seconds, passes, read = best
    figures = f"{format_size(read)} at {rate / 1e9:.3g} GB/s ({source})"
    return Rival(name, kind, seconds, f"it reads {2 * passes} times {figures}")


def _sharded(problem: SplitProblem) -> Rival:
    """Return FSDP2 over all machines, with equal shares of the parameters and of the micro-batches."""
    parts, count = problem.parts, len(problem.machines)
    name = f"FSDP2 over {listed([machine.name for machine in problem.machines])}"
    frozen, trained = _frozen(parts), _trained(parts)
    need = (frozen + _STATE * trained) // count + _BUFFERS * _largest(parts) + _kept_bytes(parts)
    for machine in problem.machines:
        if machine.memory_bytes and need > machine.memory_bytes:
            why = f"equal shares need {format_size(need)}, and {machine.name} has "
            return Rival(name, "sharded", None, why + format_size(machine.memory_bytes))
    rate = _ring_rate(problem.links, count)
    if not rate:
        return Rival(name, "sharded", None, "its links are not measured")
    received = (2 * (frozen + trained) + trained) * (count - 1) / count
    # The gathers of the blocks follow each other, and each takes as many hops as there are others.
    hops = 2 * len(parts.blocks) * (count - 1)
    sending_s = received / rate + hops * max(map(max, problem.links.latencies))
    each = -(-problem.batches // count)
    computing_s = each * max(sum(_whole(problem, number)) for number in range(count))
    why = f"each machine receives {format_size(received)} a step, which takes {format_duration(sending_s)}"
    return Rival(name, "sharded", max(sending_s, computing_s), why)


def _ring_rate(links: LinkRates, count: int) -> float:
    """Return the rate of the slowest link of the best ring; of the ring in order if there are many."""
    rest = tuple(range(1, count))
    rings = permutations(rest) if count <= _MOST_SEARCHED else iter([rest])
    return max(min(links.rates[a][b] for a, b in zip((0, *ring), (*ring, 0), strict=True)) for ring in rings)


def _fewer(problem: SplitProblem) -> Iterator[Rival]:
    """Yield the best split over fewer of the machines that a split over all would use, if there is one."""
    try:
        used = sorted(price_split(problem, range(len(problem.machines))).machines)
    except RunError:  # the model does not fit
        return
    smallest = 2 if len(used) <= _MOST_SEARCHED else len(used) - 1
    prices = []
    for size in range(smallest, len(used)):
        for chosen in combinations(used, size):
            try:
                prices.append(price_split(problem, chosen))
            except RunError:  # the model does not fit on them
                continue
    prices = [price for price in prices if len(price.machines) > 1]  # of one alone, another rival tells
    if prices:
        best = min(prices, key=lambda price: price.step.step_s)
        names = [problem.machines[number].name for number in sorted(best.machines)]
        yield Rival(f"a split over {listed(names)} only", "fewer", best.step.step_s, best.step.why[0])
