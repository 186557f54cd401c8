"""All-reduces of a group on simulated links, as the session runs them in each synchronization mode."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

from barnraise.collectives.algorithms.cost_model import CostTable, choose
from barnraise.collectives.algorithms.schedule import (
    MAX_SEGMENT_BYTES,
    BufferLayout,
    IndexedSchedule,
    OperationKind,
)
from barnraise.compression import Codec
from barnraise.compression.allreduce.sharded import CHUNK_NUMBERS, cut
from barnraise.core.errors import ConfigError
from barnraise.planning.inputs.codecs import LOSSY
from barnraise.planning.inputs.codecs import PlanCodec as Known
from barnraise.planning.inputs.levels import Shape
from barnraise.training.gradients.reducer import BUCKET_BYTES
from barnraise.training.sync import Sync
from benchmarks.simulation.fake_clock import FakeClock
from benchmarks.simulation.network import Network
from benchmarks.simulation.operations import Operation, compiled

_FLOAT = 4
MANY = 64  # members; in larger groups, not every message is simulated


class Links(NamedTuple):
    """Knowledge of the collectives about a network, and the places of its machines.

    ``sites``: machines by site, the leader first; if empty, the group is flat. ``bucket_bytes``: bytes that
    are summed as one; larger buckets mean fewer messages to simulate. ``across``: shape in which the leaders
    sum, in the order of the sites, if not that of the strategy ``sites``. ``codecs``: speed of encoding and
    decoding. ``copying``: seconds of copying and adding before sending, for each second of a codec.
    """

    table: CostTable
    sites: tuple[tuple[int, ...], ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    across: Shape | None = None
    codecs: tuple[Known, ...] = LOSSY
    copying: float = 0.0


class Summing:
    """Sum of one step over a number of elements; each member starts when it is ready."""

    def __init__(
        self,
        clock: FakeClock,
        network: Network,
        owner: Hashable,
        hosts: Sequence[int],
        held: Callable[[int], None],
    ) -> None:
        self._clock, self._network, self._owner = clock, network, owner
        self._hosts, self._held = hosts, held
        self._missing = [0] * len(hosts)  # parts that each rank has not got yet

    def begin(self, rank: int) -> None:
        raise NotImplementedError

    def _operation(
        self, programs: Sequence[IndexedSchedule], done: Callable[[int], None] | None = None
    ) -> Operation:
        return Operation(self._network, self._owner, self._hosts, programs, done or self._got)

    def _got(self, rank: int) -> None:
        self._missing[rank] -= 1
        if not self._missing[rank]:
            self._held(rank)


class ExactSum(Summing):
    """Buckets, each an all-reduce."""

    def __init__(self, *given: object, links: Links, numbers: int) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        whole, rest = divmod(numbers * _FLOAT, links.bucket_bytes)
        sizes = [links.bucket_bytes] * whole + [rest] * (rest > 0)
        self._operations = [self._operation(all_reduce(size, self._hosts, links)) for size in sizes]
        self._missing = [len(sizes)] * len(self._hosts)

    def begin(self, rank: int) -> None:
        for operation in self._operations:
            operation.begin(rank)


class StagedSum(Summing):
    """To each site's leader along a chain, among leaders as a plan says, and back, one after the other."""

    def __init__(self, *given: object, links: Links, numbers: int, across: Shape) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        sites, size = _ranks_by_site(self._hosts, links), numbers * _FLOAT
        self._places = {
            rank: (site, place) for site, ranks in enumerate(sites) for place, rank in enumerate(ranks)
        }
        chains = [_along(OperationKind.REDUCE, "ring", size, len(ranks)) for ranks in sites]
        backwards = [_along(OperationKind.BROADCAST, "ring", size, len(ranks)) for ranks in sites]
        self._inward = [
            self._among(ranks, programs, partial(self._summed, site))
            for site, (ranks, programs) in enumerate(zip(sites, chains, strict=True))
        ]
        leaders = [ranks[0] for ranks in sites]
        programs = _along(OperationKind.ALL_REDUCE, across, size, len(leaders))
        self._across = self._among(leaders, programs, lambda site: self._outward[site].begin(0))
        self._outward = [
            self._among(ranks, programs, partial(self._came_back, ranks))
            for ranks, programs in zip(sites, backwards, strict=True)
        ]

    def begin(self, rank: int) -> None:
        site, place = self._places[rank]
        self._inward[site].begin(place)

    def _summed(self, site: int, place: int) -> None:
        if place:
            self._outward[site].begin(place)
        else:
            self._across.begin(site)

    def _came_back(self, ranks: Sequence[int], place: int) -> None:
        self._held(ranks[place])

    def _among(
        self, ranks: Sequence[int], programs: Sequence[IndexedSchedule], done: Callable[[int], None]
    ) -> Operation:
        hosts = [self._hosts[rank] for rank in ranks]
        return Operation(self._network, self._owner, hosts, programs, done)


class CodedSum(Summing):
    """Encoded all-reduce as in ``compression.allreduce.sharded``: reduce-scatter to shard owners, then
    all-gather.

    Pieces are encoded one after another, while others are being sent. Received pieces are decoded at the end.
    A sparse codec's payloads are all-gathered instead.
    """

    def __init__(self, *given: object, links: Links, numbers: int, codec: Codec, codec_s: float) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        world = len(self._hosts)
        if codec.is_sparse:
            sizes = [codec.payload_bytes(numbers)]
            self._shares: list[Operation] = []
        else:
            spans = [min(CHUNK_NUMBERS, numbers - first) for first in range(0, numbers, CHUNK_NUMBERS)]
            shards = [max(part.stop - part.start for part in cut(span, world, codec.grain)) for span in spans]
            sizes = [codec.payload_bytes(shard) for shard in shards]
            self._shares = [
                self._operation(_all_to_all(size, world), partial(self._owned, number))
                for number, size in enumerate(sizes)
            ]
        self._sums = [self._operation(all_gather(size, self._hosts, links)) for size in sizes]
        self._missing = [len(sizes)] * world
        self._copy_s, self._piece_s = links.copying * codec_s, codec_s / 2 / len(sizes)

    def begin(self, rank: int) -> None:
        for number, operation in enumerate(self._shares or self._sums):
            ready_s = self._copy_s + (number + 1) * self._piece_s
            self._clock.later(ready_s, partial(operation.begin, rank))

    def _owned(self, number: int, rank: int) -> None:
        self._clock.later(self._piece_s, partial(self._sums[number].begin, rank))


def make_sum(
    sync: Sync,
    clock: FakeClock,
    network: Network,
    owner: Hashable,
    hosts: Sequence[int],
    held: Callable[[int], None],
    links: Links,
    numbers: int,
) -> Summing:
    given = (clock, network, owner, hosts, held)
    if not sync.is_encoded and links.across is not None:
        return StagedSum(*given, links=links, numbers=numbers, across=links.across)
    if not sync.is_encoded:
        return ExactSum(*given, links=links, numbers=numbers)
    codec = sync.make_codec()
    if not isinstance(codec, Codec):
        raise ConfigError(f"{sync.codec} is not simulated", hint="Take one of the other codecs.")
    codec_s = seconds_of(sync.codec, links.codecs, numbers)
    return CodedSum(*given, links=links, numbers=numbers, codec=codec, codec_s=codec_s)


def seconds_of(codec: str, codecs: Sequence[Known], numbers: int) -> float:
    """Return the seconds to encode and decode this many numbers."""
    known = next(codec_facts for codec_facts in codecs if codec_facts.name == codec)
    return 0.0 if known.mb_per_s is None else numbers * _FLOAT / known.mb_per_s / 1e6


def all_reduce(size: int, hosts: Sequence[int], links: Links) -> tuple[IndexedSchedule, ...]:
    world = len(hosts)
    sites = _ranks_by_site(hosts, links)
    choice = choose(
        OperationKind.ALL_REDUCE,
        size,
        world,
        links.table,
        "sites" if sites else "auto",
        limit=MAX_SEGMENT_BYTES,
        leaders=len(sites),
    )
    # Segments of a group this large would be tiny, and millions; what a link carries is the same.
    segment = MAX_SEGMENT_BYTES if sites and world > MANY else choice.segment
    layout = BufferLayout(sizes=(size,), item=_FLOAT, segment=segment, arity=choice.arity, sites=sites)
    return compiled(OperationKind.ALL_REDUCE, choice.algorithm, world, layout)


def _ranks_by_site(hosts: Sequence[int], links: Links) -> tuple[tuple[int, ...], ...]:
    """Group the present ranks by site; the first present rank of a site leads it."""
    places = {host: rank for rank, host in enumerate(hosts)}
    here = (tuple(places[host] for host in site if host in places) for site in links.sites)
    return tuple(site for site in here if site)


def _along(kind: str, strategy: str, size: int, world: int) -> tuple[IndexedSchedule, ...]:
    """Compile a schedule from or to the first rank."""
    return compiled(
        kind, strategy, world, BufferLayout(sizes=(size,), item=_FLOAT, segment=MAX_SEGMENT_BYTES)
    )


def all_gather(block: int, hosts: Sequence[int], links: Links) -> tuple[IndexedSchedule, ...]:
    world = len(hosts)
    choice = choose(OperationKind.ALL_GATHER, block * world, world, links.table, limit=MAX_SEGMENT_BYTES)
    layout = BufferLayout(sizes=(block,) * world, segment=choice.segment)
    return compiled(OperationKind.ALL_GATHER, choice.algorithm, world, layout)


def _all_to_all(block: int, world: int) -> tuple[IndexedSchedule, ...]:
    layout = BufferLayout(sizes=(block,) * (2 * world), segment=MAX_SEGMENT_BYTES)
    return compiled(OperationKind.ALL_TO_ALL, "direct", world, layout)
