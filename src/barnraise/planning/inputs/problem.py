"""Everything that a prediction depends on, in the forms that arithmetic needs. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy

from barnraise.planning.cost.link_matrix import LinkMatrix, find_sites
from barnraise.planning.cost.rings import MOST_EXACT, RingTable, ring_order
from barnraise.planning.cost.traffic_model import ring_piece
from barnraise.planning.cost.work_split import split_samples
from barnraise.planning.inputs.cluster import PlanCluster
from barnraise.planning.inputs.codecs import PlanCodec, PlanPayload, exact_codec, payload
from barnraise.planning.inputs.inputs import ModelSize, PlanLimits, StepTimes
from barnraise.planning.plan.calibration import Calibration

# Of so many machines all subsets are tried.
MOST_SUBSETS = 8

Group = tuple[int, ...]


class StepWork(NamedTuple):
    """A step's computing in a group: samples and seconds of each, and how long gradients may hide in it."""

    samples: list[int]
    seconds: list[float]
    longest_s: float
    hideable_s: float


class PlanProblem:
    """Members are known by number, in the order of their names."""

    def __init__(
        self,
        cluster: PlanCluster,
        model: ModelSize,
        profile: StepTimes,
        options: PlanLimits,
        calibration: Calibration,
    ) -> None:
        self.cluster = cluster
        self.model = model
        self.profile = profile
        self.options = options
        self.calibration = calibration
        self.count = len(cluster.members)
        self.everybody: Group = tuple(range(self.count))
        self.names = tuple(member.name for member in cluster.members)
        self.speeds = [member.samples_per_s / calibration.compute for member in cluster.members]
        self.wires = LinkMatrix(cluster)
        self.sites = find_sites(cluster, self.wires)
        self.exact = exact_codec(model.wire_bytes)
        self.codecs: tuple[PlanCodec, ...] = (self.exact, *options.codecs)
        self._payloads = {codec.name: payload(codec, model.parameters) for codec in self.codecs}
        self._rings: dict[tuple[Group, str], Group] = {}
        self._tables: dict[Group, RingTable] = {}
        self._work: dict[tuple[Group, int], StepWork | None] = {}

    def payload(self, codec: PlanCodec) -> PlanPayload:
        return self._payloads[codec.name]

    def codec_s(self, codec: PlanCodec) -> float:
        """The work of writing gradients down and reading them, which nothing hides."""
        return 0.0 if codec.mb_per_s is None else self.model.gradient_bytes / (codec.mb_per_s * 1e6)

    def speed(self, group: Group) -> float:
        """Samples per second if nobody ever waited."""
        return sum(self.speeds[one] for one in group)

    def work(self, group: Group, batch: int) -> StepWork | None:
        """None if somebody would have nothing to do, unless the group is given: then he only adds."""
        key = (group, batch)
        if key not in self._work:
            self._work[key] = self._dealt(group, batch)
        return self._work[key]

    def _dealt(self, group: Group, batch: int) -> StepWork | None:
        profile = self.profile
        unit = min(profile.unit_size, batch)
        speeds = [self.speeds[one] for one in group]
        samples = split_samples(batch, unit, speeds)
        if min(samples) < 1 and not self.options.is_given:
            return None
        seconds = [count / speed for count, speed in zip(samples, speeds, strict=True)]
        # Gradients can travel when the last of the members has come to its last backward pass.
        begins = 0.0
        for count, busy, speed in zip(samples, seconds, speeds, strict=True):
            last = busy if profile.travels == "step" else min(unit, count) / speed
            begins = max(begins, busy - profile.backward_share * last)
        longest = max(seconds)
        return StepWork(samples, seconds, longest, longest - begins)

    def ring(self, group: Group, codec: PlanCodec) -> Group:
        """The order of the group's ring for what this codec sends."""
        key = (group, codec.name if len(group) <= MOST_EXACT else "")
        if key not in self._rings:
            self._rings[key] = self._ordered(group, codec)
        return self._rings[key]

    def _ordered(self, group: Group, codec: PlanCodec) -> Group:
        if len(group) > MOST_EXACT:
            piece = ring_piece(self.payload(self.exact), len(group))
            return tuple(group[place] for place in ring_order(self.wires.hop_costs(group, piece)))
        # Few machines share one table of all their subsets; of many, each group has its own.
        few = self.count <= MOST_SUBSETS
        among = self.everybody if few else group
        sizes = range(2, self.count + 1) if few else range(len(group), len(group) + 1)
        if among not in self._tables:
            pieces = [ring_piece(self.payload(one), size) for one in self.codecs for size in sizes]
            costs = numpy.stack([self.wires.hop_costs(among, piece) for piece in pieces])
            self._tables[among] = RingTable(costs)
        table = self.codecs.index(codec) * len(sizes) + sizes.index(len(group))
        subset = sum(1 << among.index(one) for one in group)
        return tuple(among[place] for place in self._tables[among].order(subset, table))
