"""Orders of passes of split models on typical homes: what interleaved and zero-bubble schedules would gain.

    python -m benchmarks.bigger.orders --quick    with the blocks that each machine has today: seconds
    python -m benchmarks.bigger.orders            blocks are also moved between machines, for each order

Nothing is run: each step is simulated exactly, as `planning/split/stage_time.py` does, on the machines of
`benchmarks.bigger.homes`. Here a machine may have several runs of blocks, and a backward pass two parts: the
gradients of what came in, and those of weights. The other orders are favoured. Their memory is not limited,
and the parts of a pass take no longer than the whole. Of several orders of a kind, the fastest counts.

The last line is one JSON object: the gain of each order over today's 1F1B in each case, and the largest one.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from barnraise.core.errors import RunError
from barnraise.planning.split.placement import place_stages, predict_placement
from barnraise.planning.split.split_problem import SplitProblem
from barnraise.planning.split.stage_placement import ModelParts, PartSize
from barnraise.planning.split.stage_time import BlockSpeed
from benchmarks.bigger.homes import BITS, HOMES, RANK, SHAPES, Home, Shape, problem_of
from benchmarks.report import environment_line, last_line, table

Kind = Literal["forward", "backward", "weights"]
Training = Literal["LoRA", "full"]
OrderName = Literal["GPipe", "interleaved", "zero-bubble", "interleaved zero-bubble", "V zero-bubble"]

_AHEAD = 2  # forward passes of today's 1F1B for each later stage
_POSTED = 2  # passes before the one that needs a message, when its receive is posted
_LIMITS = (1, 2, 3, math.inf)  # forward passes that a greedy order is ahead for each later run of blocks
_MOST_MOVES = 12
_LINES = (("1 Gbit/s", 1000.0, 0.0002), ("Wi-Fi", 200.0, 0.003))
_SMALL_SHAPES = (
    Shape("TinyLlama 1.1B", 2048, 5632, 22, 2, 32000),  # its heads are narrower: four of 64 are two of 128
    Shape("Llama 3.2 3B", 3072, 8192, 28, 8, 128256),
)
_BF16 = 2


class Chunk(NamedTuple):
    """A run of blocks on a machine, with the seconds of a micro-batch there.

    ``backward_s``: of the gradients of what came in. ``weights_s``: of those of weights, if they are computed
    in a pass of their own; else the backward pass has both.
    """

    machine: int
    forward_s: float
    backward_s: float
    weights_s: float = 0.0


class Pass(NamedTuple):
    """Pass of a micro-batch through a chunk."""

    kind: Kind
    chunk: int
    number: int


class Line(NamedTuple):
    """Seconds of a message of one micro-batch from a machine to another one, and the latency."""

    send_s: float
    latency_s: float


Lines = Sequence[Sequence[Line]]
Chooser = Callable[["Simulation", int], Pass | None]


class Simulation:
    """Passes and messages of one step, in the order of their times.

    A machine does one thing at a time, and asks ``choose`` for the next pass. A line carries one message at a
    time in each direction: the first one that its sender has offered and its receiver awaits.
    """

    def __init__(
        self, chunks: Sequence[Chunk], batches: int, lines: Lines, choose: Chooser, *, is_split: bool
    ) -> None:
        self.chunks, self.batches, self.is_split = chunks, batches, is_split
        self.done: dict[int, list[Pass]] = defaultdict(list)  # by machine
        self.arrived: dict[Pass, float] = {}  # what a pass needs, by the pass
        self.posted: dict[Pass, float] = {}  # when the receive of what a pass needs is posted
        self.ended: set[Pass] = set()
        self.now_s = 0.0
        self._lines, self._choose = lines, choose
        self._busy: set[int] = set()
        self._ready: dict[Pass, float] = {}  # when a message for a pass could be offered
        self._queues: dict[tuple[int, int], list[tuple[float, int, Pass]]] = defaultdict(list)
        self._busy_lines: set[tuple[int, int]] = set()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = itertools.count()

    @property
    def machines(self) -> list[int]:
        """Return the machines with chunks."""
        return sorted({chunk.machine for chunk in self.chunks})

    def own(self, machine: int) -> list[int]:
        """Return the chunks of a machine."""
        return [number for number, chunk in enumerate(self.chunks) if chunk.machine == machine]

    def seconds(self, each: Pass) -> float:
        """Return the seconds of a pass."""
        chunk = self.chunks[each.chunk]
        if each.kind == "forward":
            return chunk.forward_s
        if each.kind == "weights":
            return chunk.weights_s
        return chunk.backward_s + (0.0 if self.is_split else chunk.weights_s)

    def source(self, each: Pass) -> Pass | None:
        """Return the pass whose result a pass needs; None of the first forward and the last backward pass."""
        if each.kind == "weights":
            return each._replace(kind="backward")
        neighbour = each.chunk + (-1 if each.kind == "forward" else 1)
        if 0 <= neighbour < len(self.chunks):
            return each._replace(chunk=neighbour)
        return None if each.kind == "forward" else each._replace(kind="forward")

    def can_start(self, each: Pass) -> bool:
        """Tell whether all that a pass needs is on its machine."""
        if each.kind == "backward" and each._replace(kind="forward") not in self.ended:
            return False
        source = self.source(each)
        if source is None:
            return True
        is_here = self.chunks[source.chunk].machine == self.chunks[each.chunk].machine
        return source in self.ended if is_here else each in self.arrived

    def run(self) -> float:
        """Return the seconds until the last pass has ended."""
        for machine in self.machines:
            self._start(machine, 0.0)

        while self._events:
            self.now_s, _, act = heapq.heappop(self._events)
            act(self.now_s)
        kinds = 3 if self.is_split else 2
        assert len(self.ended) == kinds * self.batches * len(self.chunks), "the machines wait for each other"
        return self.now_s

    def post(self, each: Pass, now: float) -> None:
        """Post the receive of what a pass needs."""
        self.posted[each] = now
        self._offer(each)

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._count), act))

    def _start(self, machine: int, now: float) -> None:
        if machine in self._busy:
            return
        chosen = self._choose(self, machine)
        if chosen is not None:
            self._busy.add(machine)
            self._at(now + self.seconds(chosen), lambda end: self._end(machine, chosen, end))

    def _end(self, machine: int, each: Pass, now: float) -> None:
        self._busy.discard(machine)
        self.ended.add(each)
        self.done[machine].append(each)
        if each.kind != "weights":
            target = each._replace(chunk=each.chunk + (1 if each.kind == "forward" else -1))
            if 0 <= target.chunk < len(self.chunks) and self.chunks[target.chunk].machine != machine:
                self._ready[target] = now
                self._offer(target)
        self._start(machine, now)

    def _offer(self, target: Pass) -> None:
        """Let a message wait for its line, if both ends know of it."""
        if target not in self._ready or target not in self.posted:
            return
        source = self.source(target)
        assert source is not None
        ends = self.chunks[source.chunk].machine, self.chunks[target.chunk].machine
        latency_s = self._lines[ends[0]][ends[1]].latency_s
        time = max(self._ready[target] + latency_s, self.posted[target]) + latency_s
        self._at(time, lambda now: self._queue(ends, target, now))

    def _queue(self, ends: tuple[int, int], target: Pass, now: float) -> None:
        heapq.heappush(self._queues[ends], (now, next(self._count), target))
        self._send(ends, now)

    def _send(self, ends: tuple[int, int], now: float) -> None:
        if ends in self._busy_lines or not self._queues[ends]:
            return
        _, _, target = heapq.heappop(self._queues[ends])
        line = self._lines[ends[0]][ends[1]]
        self._busy_lines.add(ends)

        def sent(then: float) -> None:
            self._busy_lines.discard(ends)
            self._at(then + line.latency_s, lambda later: self._arrive(ends[1], target, later))
            self._send(ends, then)

        self._at(now + line.send_s, sent)

    def _arrive(self, machine: int, target: Pass, now: float) -> None:
        self.arrived[target] = now
        self._start(machine, now)


def simulate_order(
    chunks: Sequence[Chunk], lines: Lines, batches: int, orders: dict[int, list[Pass]], *, is_split: bool
) -> float:
    """Return the seconds of a step whose machines compute their passes in given orders.

    As today, a machine posts the receive for a pass two passes early.
    """
    posted: dict[int, int] = dict.fromkeys(orders, 0)

    def choose(simulation: Simulation, machine: int) -> Pass | None:
        own, ended = orders[machine], len(simulation.done[machine])
        now = simulation.now_s
        while posted[machine] < min(len(own), ended + _POSTED + 1):
            simulation.post(own[posted[machine]], now)
            posted[machine] += 1
        if ended == len(own):
            return None
        return own[ended] if simulation.can_start(own[ended]) else None

    return Simulation(chunks, batches, lines, choose, is_split=is_split).run()


def greedy_orders(
    chunks: Sequence[Chunk], lines: Lines, batches: int, limit: float, *, is_split: bool
) -> dict[int, list[Pass]]:
    """Return orders in which each machine computes what it can: backward passes first, then forward ones.

    A chunk is ahead by ``limit`` forward passes for each later chunk. Gradients of weights are computed when
    nothing else can be. Receives are posted from the beginning.
    """
    group = len({chunk.machine for chunk in chunks})
    following: dict[tuple[Kind, int], int] = defaultdict(int)  # the next number by kind and chunk
    last = len(chunks) - 1

    def choose(simulation: Simulation, machine: int) -> Pass | None:
        own = simulation.own(machine)
        for kind, key in _PRIORITIES if is_split else _PRIORITIES[:2]:
            able = [Pass(kind, chunk, following[kind, chunk]) for chunk in own]
            able = [each for each in able if each.number < batches and simulation.can_start(each)]
            if kind == "forward":
                able = [each for each in able if ahead(each.chunk) < allowed(each.chunk)]
            if able:
                chosen = min(able, key=lambda each: key(each, group))
                following[kind, chosen.chunk] += 1
                return chosen
        return None

    def allowed(chunk: int) -> float:
        return limit * (last - chunk) + 1 if limit < math.inf else batches

    def ahead(chunk: int) -> int:
        return following["forward", chunk] - following["backward", chunk]

    simulation = Simulation(chunks, batches, lines, choose, is_split=is_split)
    for chunk, number in itertools.product(range(len(chunks)), range(batches)):
        for kind in ("forward", "backward"):
            simulation.posted[Pass(kind, chunk, number)] = 0.0
    simulation.run()
    return dict(simulation.done)


_PRIORITIES: tuple[tuple[Kind, Callable[[Pass, int], tuple[int, ...]]], ...] = (
    ("backward", lambda each, group: (each.number, -each.chunk)),
    ("forward", lambda each, group: (each.number // group, each.chunk, each.number)),
    ("weights", lambda each, group: (each.number, -each.chunk)),
)


def todays_orders(machines: Sequence[int], batches: int, *, ahead: float = _AHEAD) -> dict[int, list[Pass]]:
    """Return the orders of 1F1B as it is run, and with an infinite ``ahead`` those of GPipe."""
    orders = {}
    for place, machine in enumerate(machines):
        first = int(min(batches, ahead * (len(machines) - 1 - place) + 1)) if ahead < math.inf else batches
        forward = deque(Pass("forward", place, number) for number in range(batches))
        order = [forward.popleft() for _ in range(first)]
        for number in range(batches):
            order.append(Pass("backward", place, number))
            if forward:
                order.append(forward.popleft())
        orders[machine] = order
    return orders


class Case(NamedTuple):
    """Model in a home. ``order``: machines of the pipeline. ``counts``: their blocks.

    ``weights_share``: part of a backward pass that computes gradients of weights.
    """

    name: str
    problem: SplitProblem
    order: tuple[int, ...]
    counts: tuple[int, ...]
    weights_share: float
    commit_s: float
    bound_s: float

    @property
    def lines(self) -> Lines:
        """Return the lines between all machines."""
        links, size = self.problem.links, self.problem.sent_bytes
        count = range(len(self.problem.machines))
        return [
            [
                Line(links.transfer_s(a, b, size), max(links.latencies[a][b], links.latencies[b][a]))
                for b in count
            ]
            for a in count
        ]

    def chunks(self, counts: Sequence[int], layout: Sequence[int]) -> list[Chunk] | None:
        """Return the chunks on the places of a layout; None if a chunk has no block."""
        total, speeds, first, result = sum(counts), self.problem.speeds, 0, []
        for number, place in enumerate(layout):
            times, turn = layout.count(place), layout[:number].count(place)
            blocks = counts[place] // times + (turn < counts[place] % times)
            if not blocks:
                return None
            machine = self.order[place]
            forward_s, backward_s = speeds[machine].passes(first, first + blocks, total)
            weights_s = self.weights_share * backward_s
            result.append(Chunk(machine, forward_s, backward_s - weights_s, weights_s))
            first += blocks
        return result

    def fits(self, counts: Sequence[int]) -> bool:
        """Tell whether the blocks fit on their machines, with the memory that 1F1B takes."""
        ends = list(itertools.accumulate(counts))
        needs = (
            self.problem.stage_bytes(end - count, end, stages=len(counts), place=place)
            for place, (count, end) in enumerate(zip(counts, ends, strict=True))
        )
        machines = (self.problem.machines[number] for number in self.order)
        return min(counts) > 0 and all(
            need <= machine.memory_bytes for need, machine in zip(needs, machines, strict=True)
        )

    def today(self, counts: Sequence[int], ahead: float = _AHEAD) -> float:
        """Return the seconds of the passes as they are run today."""
        chunks = self.chunks(counts, range(len(counts)))
        assert chunks is not None
        batches = self.problem.batches
        orders = todays_orders(self.order, batches, ahead=ahead)
        return simulate_order(chunks, self.lines, batches, orders, is_split=False)

    def best(self, counts: Sequence[int], name: OrderName, limits: Sequence[float]) -> float:
        """Return the seconds of the passes in the fastest order of a kind; infinity if there is none."""
        if name == "GPipe":
            return self.today(counts, math.inf)
        places = list(range(len(counts)))
        layout = {
            "interleaved": [*places, *places],
            "zero-bubble": places,
            "interleaved zero-bubble": [*places, *places],
            "V zero-bubble": [*places, *reversed(places)],
        }[name]
        chunks = self.chunks(counts, layout)
        if chunks is None:
            return math.inf
        is_split, batches = name != "interleaved", self.problem.batches
        times = []
        for limit in limits:
            orders = greedy_orders(chunks, self.lines, batches, limit, is_split=is_split)
            times.append(simulate_order(chunks, self.lines, batches, orders, is_split=is_split))
        return min(times)


def with_moves(case: Case, seconds: Callable[[Sequence[int]], float], *, moves: bool) -> float:
    """Return the shortest step that an order has when blocks are moved between machines, one at a time."""
    counts, best_s = case.counts, seconds(case.counts)
    for _ in range(_MOST_MOVES if moves else 0):
        tried = []
        for giver, taker in itertools.permutations(range(len(counts)), 2):
            moved = list(counts)
            moved[giver] -= 1
            moved[taker] += 1
            if case.fits(moved):
                tried.append((seconds(moved), tuple(moved)))
        if not tried or min(tried)[0] >= best_s:
            break
        best_s, counts = min(tried)
    return best_s


def cases() -> Iterator[Case]:
    """Yield each model in each home, on both kinds of lines, that is split over several machines."""
    for home, (line, mbps, latency_s) in itertools.product(HOMES, _LINES):
        own = home._replace(mbps=mbps, latency_s=latency_s)
        for shape, bits in itertools.product(SHAPES, BITS):
            name = f"{home.name}; {line}; {shape.name}, {bits} bits, LoRA"
            yield from _case(name, problem_of(own, shape, bits), _lora_share(shape))
        for shape in _SMALL_SHAPES:
            problem = full_problem(own, shape)
            yield from _case(f"{home.name}; {line}; {shape.name}, full", problem, 1 / 3)


def _case(name: str, problem: SplitProblem, weights_share: float) -> Iterator[Case]:
    try:
        placed = place_stages(problem)
    except RunError:  # the model does not fit
        return
    if len(placed.order) > 1:
        step = predict_placement(problem, placed.order, placed.runs)
        counts = tuple(end - first for first, end in placed.runs)
        yield Case(name, problem, placed.order, counts, weights_share, step.commit_s, step.bound_s)


def _lora_share(shape: Shape) -> float:
    """Return the part of a backward pass for the adapter's gradients; the rest recomputes, and passes on."""
    weights = sum(rows * columns for rows, columns in shape.matrices)
    adapter = RANK * sum(rows + columns for rows, columns in shape.matrices)
    return adapter / weights / 2


def full_problem(home: Home, shape: Shape) -> SplitProblem:
    """Return a model that is trained as a whole in bfloat16. Backward passes take three forward passes."""
    problem = problem_of(home, shape, 16)
    machines = tuple(
        machine._replace(
            speed=BlockSpeed(
                machine.speed.forward_s, 3 * machine.speed.forward_s, after_s=1.5 * machine.speed.after_s
            )
        )
        for machine in problem.machines
    )
    weights = _BF16 * sum(rows * columns for rows, columns in shape.matrices)
    ends = problem.parts.before.frozen_bytes
    block = problem.parts.blocks[0]._replace(frozen_bytes=0, trained_bytes=weights)
    parts = ModelParts(
        PartSize(0, ends),
        (block,) * shape.layers,
        problem.parts.after._replace(frozen_bytes=0, trained_bytes=ends),
        problem.parts.boundary_bytes,
    )
    return problem._replace(parts=parts, machines=machines)


ORDERS: tuple[OrderName, ...] = (
    "GPipe",
    "interleaved",
    "zero-bubble",
    "interleaved zero-bubble",
    "V zero-bubble",
)


def gains_of(case: Case, *, moves: bool) -> tuple[float, dict[str, float]]:
    """Return today's step, and how much faster steps are by order: 0.05 is five percent."""
    today_s = with_moves(case, case.today, moves=moves) + case.commit_s
    gains = {}
    for name in ORDERS:

        def seconds(counts: Sequence[int], name: OrderName = name) -> float:
            return case.best(counts, name, _LIMITS)

        gains[name] = today_s / (with_moves(case, seconds, moves=moves) + case.commit_s) - 1
    return today_s, gains


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="leave the blocks where they are")
    options = parser.parse_args()
    print(environment_line(), flush=True)
    rows: list[Sequence[object]] = []
    figures: dict[str, Any] = {"is_simulated": True, "moves_blocks": not options.quick, "gains": {}}
    for case in cases():
        step_s, gains = gains_of(case, moves=not options.quick)
        bound_gain = step_s / (case.bound_s + case.commit_s) - 1
        shown = (*gains.values(), bound_gain)
        rows.append((case.name, f"{step_s:.1f} s", *(f"{gain:+.1%}" for gain in shown)))
        figures["gains"][case.name] = {"step_s": step_s, "without_any_waiting": bound_gain, **gains}
    print(table(("case", "1F1B today", *ORDERS, "no waiting"), rows))
    for training in ("LoRA", "full"):
        chosen = [gains for name, gains in figures["gains"].items() if name.endswith(training)]
        figures[f"largest_gain_{training}"] = {
            name: max(gains[name] for gains in chosen) for name in (*ORDERS, "without_any_waiting")
        }
    last_line(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
