"""Predicted time of a step of a split model: each micro-batch goes through unlike stages and back. Pure.

The order of passes and transfers is simulated exactly. A stage does one thing at a time, and a link carries
one message at a time in each direction. The bound is what the slowest stage or link needs if it never waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from barnraise.core.units import format_duration
from barnraise.planning.split.stage_placement import ModelParts, held_parts

StageOrder = Literal["1F1B", "GPipe"]
_Kind = Literal["forward", "backward"]
_VOTE_TRIPS = 2  # an offer of the message, and the message
FORWARD_SHARE = 1 / 3  # of both passes of a block, until it is measured
_LEAST_SHARE = 0.25  # of a stage's time that its blocks take
_AHEAD = 2  # forward passes of 1F1B for each later stage
_POSTED = 2  # passes before the one that needs a message, when its receive is posted


class BlockSpeed(NamedTuple):
    """Seconds that a machine takes for a micro-batch; ``forward_s`` and ``backward_s`` of one block.

    All are 0 if it was not measured. ``before_s`` and ``after_s``: both passes of the parts before and after
    the blocks. ``around_s``: what each stage computes beside its blocks, such as masks.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    before_s: float = 0.0
    after_s: float = 0.0
    around_s: float = 0.0

    @property
    def block_s(self) -> float:
        """Return the seconds of both passes of a block."""
        return self.forward_s + self.backward_s

    def passes(self, first: int, end: int, blocks: int) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward pass of a stage."""
        besides_s = (self.before_s if first == 0 else 0.0) + (self.after_s if end == blocks else 0.0)
        share = self.forward_s / self.block_s if self.block_s else 0.0
        count = end - first
        forward_s = count * self.forward_s + share * besides_s + self.around_s
        return forward_s, count * self.backward_s + (1 - share) * besides_s

    def corrected(self, busy_s: float, first: int, end: int, blocks: int) -> BlockSpeed:
        """Return the speed after a stage was measured; ``busy_s``: both passes of a micro-batch there."""
        share = self.forward_s / self.block_s if self.block_s else FORWARD_SHARE
        besides_s = self.around_s
        besides_s += (self.before_s if first == 0 else 0.0) + (self.after_s if end == blocks else 0.0)
        block_s = max(busy_s - besides_s, _LEAST_SHARE * busy_s) / (end - first)
        return self._replace(forward_s=share * block_s, backward_s=(1 - share) * block_s)


def fill_unknown(speeds: Sequence[BlockSpeed]) -> list[BlockSpeed]:
    """Return the speeds with the slowest known one for the others; none if no speed is known."""
    known = [speed for speed in speeds if speed.block_s]
    if not known:
        return []
    slowest = max(known, key=lambda speed: speed.block_s)
    return [speed if speed.block_s else slowest for speed in speeds]


class LinkRates(NamedTuple):
    """Bytes per second and one-way latency in seconds from each machine to each other; rate 0: unknown."""

    rates: tuple[tuple[float, ...], ...]
    latencies: tuple[tuple[float, ...], ...]

    def transfer_s(self, sender: int, receiver: int, count: float) -> float:
        """Return the seconds in which bytes leave, without the latency; 0 if the rate is unknown."""
        rate = self.rates[sender][receiver]
        return count / rate if rate > 0 else 0.0


class StageTime(NamedTuple):
    """Seconds of a micro-batch on a stage, and on the link to the next one.

    ``send_s``: for the activations. ``return_s``: for their gradient, from the next stage to this one.
    ``latency_s``: one way.
    """

    name: str
    forward_s: float
    backward_s: float
    send_s: float = 0.0
    return_s: float = 0.0
    latency_s: float = 0.0


class SplitStepTime(NamedTuple):
    """Predicted seconds of a step, and what limits it.

    ``bound_s``: of the slowest stage or link without any waiting. ``waiting_s``: what it waits, mostly while
    the pipeline fills and empties. ``commit_s``: of the exchange of gradients and the vote. ``busy_s``: what
    each stage computes. ``limit``: the slowest stage or link, in words.
    """

    step_s: float
    bound_s: float
    waiting_s: float
    commit_s: float
    busy_s: tuple[float, ...]
    limit: str
    why: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Return the prediction and its reasons in one sentence."""
        return f"{format_duration(self.step_s)} for a step; {'; '.join(self.why)}"


def stage_times(
    runs: Sequence[tuple[int, int]],
    machines: Sequence[int],
    names: Sequence[str],
    speeds: Sequence[BlockSpeed],
    links: LinkRates,
    sent_bytes: int,
) -> list[StageTime]:
    """Return the times of the stages in the order of the pipeline.

    ``sent_bytes``: of a micro-batch, to the next stage or back. ``runs``: blocks of each stage. ``machines``:
    number of the machine of each stage. The others are by the number of the machine.
    """
    stages = []
    for place, (run, machine) in enumerate(zip(runs, machines, strict=True)):
        forward_s, backward_s = speeds[machine].passes(*run, runs[-1][1])
        stage = StageTime(names[machine], forward_s, backward_s)
        if place + 1 < len(runs):
            after = machines[place + 1]
            stage = stage._replace(
                send_s=links.transfer_s(machine, after, sent_bytes),
                return_s=links.transfer_s(after, machine, sent_bytes),
                latency_s=max(links.latencies[machine][after], links.latencies[after][machine]),
            )
        stages.append(stage)
    return stages


def commit_seconds(
    parts: ModelParts,
    runs: Sequence[tuple[int, int]],
    machines: Sequence[int],
    links: LinkRates,
    *,
    has_mirrors: bool = True,
) -> float:
    """Return the seconds from the last backward pass of a step to its commit, and of its preparation.

    Each machine sends the gradients of its stage to its mirror: the next stage, or of the last stage the one
    before it. A single stage is mirrored by the next machine, if there is one. Then all machines vote. A
    stage is prepared in one round trip through the pipeline.
    """
    everyone = range(len(links.rates))
    if len(everyone) < 2:
        return 0.0
    exchange_s = 0.0
    received = dict.fromkeys(everyone, 0.0)
    for place, (first, end) in enumerate(runs):
        sender = machines[place]
        neighbour = place + 1 if place + 1 < len(runs) else place - 1
        receiver = machines[neighbour] if len(runs) > 1 else (sender + 1) % len(everyone)
        count = sum(part.trained_bytes for part in held_parts(parts, first, end))
        if not has_mirrors or not count:
            continue
        received[receiver] += links.transfer_s(sender, receiver, count)  # through one port
        exchange_s = max(exchange_s, received[receiver] + links.latencies[sender][receiver])
    vote_s = _VOTE_TRIPS * max(links.latencies[a][b] for a in everyone for b in everyone if a != b)
    return exchange_s + vote_s + 2 * math.fsum(links.latencies[a][b] for a, b in pairwise(machines))


def predict_split_step(
    stages: Sequence[StageTime],
    batches: int,
    order: StageOrder = "1F1B",
    commit_s: float = 0.0,
) -> SplitStepTime:
    """Predict a step of ``batches`` micro-batches through these stages.

    A message starts when its receiver has posted the receive. A stage posts it two passes early, and does not
    wait for what it sends. In 1F1B, it runs ahead by two forward passes for each stage after it.
    """
    pipeline_s = _Simulation(stages, batches, order).run()
    busy = tuple(batches * (stage.forward_s + stage.backward_s) for stage in stages)
    slowest = max(range(len(stages)), key=lambda place: busy[place])
    bound_s, limit = busy[slowest], stages[slowest].name
    why = f"{limit} computes longest, {format_duration(bound_s)}"
    if len(stages) == 1:
        why = f"{limit} computes all of it"
    for stage, after in pairwise(stages):
        for seconds, ends in ((stage.send_s, (stage, after)), (stage.return_s, (after, stage))):
            if batches * seconds > bound_s:
                bound_s = batches * seconds
                limit = f"the link from {ends[0].name} to {ends[1].name}"
                why = f"{limit} is busy longest, {format_duration(bound_s)}"
    reasons = [why]
    waiting_s = max(0.0, pipeline_s - bound_s)
    if len(stages) > 1:
        share = waiting_s / (pipeline_s + commit_s) if pipeline_s else 0.0
        waits = f"{limit} waits {format_duration(waiting_s)} ({share:.0%})"
        reasons.append(f"{waits} while the pipeline fills, empties and sends")
    if commit_s:
        reasons.append(f"the exchange of gradients and the vote take {format_duration(commit_s)}")
    return SplitStepTime(pipeline_s + commit_s, bound_s, waiting_s, commit_s, busy, limit, tuple(reasons))


class _Pass(NamedTuple):
    """Pass of a micro-batch on a stage; also the name of the message that it sends."""

    place: int
    kind: _Kind
    number: int


class _Simulation:
    """Passes and messages of one step; each gets its time when all that it waits for have theirs."""

    def __init__(self, stages: Sequence[StageTime], batches: int, order: StageOrder) -> None:
        self._stages, count = stages, len(stages)
        ahead = [_AHEAD * (count - 1 - place) + 1 if order == "1F1B" else batches for place in range(count)]
        self._passes = [_order_of(place, min(ahead[place], batches), batches) for place in range(count)]
        self._needed_by = {
            source: number
            for passes in self._passes
            for number, current in enumerate(passes)
            if (source := self._source(current)) is not None
        }
        self._ends: list[list[float]] = [[] for _ in stages]  # when a stage was done with each pass
        self._ready: dict[_Pass, float] = {}  # when a message could be sent
        self._sent: dict[_Pass, float] = {}  # when its last byte has left

    def run(self) -> float:
        """Return the seconds until the last pass has ended."""
        places = range(len(self._stages))
        left = sum(map(len, self._passes))
        while left:
            done = sum(self._advance_all(place) for place in places)
            assert done, "the stages of a pipeline wait for each other"
            left -= done
        return max(ends[-1] for ends in self._ends)

    def _advance_all(self, place: int) -> int:
        """Give times to the next passes of a stage, and return how many got one."""
        before = len(self._ends[place])
        while len(self._ends[place]) < len(self._passes[place]) and self._advance(place):
            pass
        return len(self._ends[place]) - before

    def _advance(self, place: int) -> bool:
        """Give the next pass of a stage its time; return False if it still waits for another stage."""
        ends = self._ends[place]
        current = self._passes[place][len(ends)]
        start = ends[-1] if ends else 0.0
        source = self._source(current)
        if source is not None:
            if not self._send(source):
                return False
            start = max(start, self._sent[source] + self._link(source)[1])
        stage = self._stages[place]
        end = start + (stage.forward_s if current.kind == "forward" else stage.backward_s)
        ends.append(end)
        if self._has_receiver(current):
            self._ready[current] = end
        return True

    def _send(self, message: _Pass) -> bool:
        """Give a message its time; return False if its sender or its receiver has none yet."""
        if message in self._sent:
            return True
        ends = self._ends[message.place + (1 if message.kind == "forward" else -1)]
        posted = self._needed_by[message] - _POSTED
        if message not in self._ready or len(ends) < posted:
            return False
        seconds, latency_s = self._link(message)
        # The sender offers it, and the receiver answers when it has posted the receive.
        posted_s = ends[posted - 1] if posted > 0 else 0.0
        start = max(self._ready[message] + latency_s, posted_s) + latency_s
        before = message._replace(number=message.number - 1)
        self._sent[message] = max(start, self._sent.get(before, 0.0)) + seconds
        return True

    def _link(self, message: _Pass) -> tuple[float, float]:
        """Return the seconds of a message, and the latency."""
        if message.kind == "forward":
            stage = self._stages[message.place]
            return stage.send_s, stage.latency_s
        stage = self._stages[message.place - 1]
        return stage.return_s, stage.latency_s

    def _source(self, current: _Pass) -> _Pass | None:
        """Return the message that a pass needs."""
        place = current.place + (-1 if current.kind == "forward" else 1)
        return current._replace(place=place) if 0 <= place < len(self._stages) else None

    def _has_receiver(self, current: _Pass) -> bool:
        place = current.place + (1 if current.kind == "forward" else -1)
        return 0 <= place < len(self._stages)


def _order_of(place: int, ahead: int, batches: int) -> list[_Pass]:
    """Return the passes of a stage in their order; ``ahead``: forward passes before the first backward."""
    forwards = [_Pass(place, "forward", number) for number in range(batches)]
    backwards = [_Pass(place, "backward", number) for number in range(batches)]
    order = forwards[:ahead]
    for backward, forward in zip(backwards, forwards[ahead:], strict=False):
        order += [backward, forward]
    return [*order, *backwards[batches - ahead :]]
