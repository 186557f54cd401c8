"""Problem instance of the planner: all inputs, in the form that the cost model needs. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy

from barnraise.planning.cost.link_matrix import LinkMatrix, find_sites
from barnraise.planning.cost.rings import MAX_EXACT, RingTable, ring_order
from barnraise.planning.cost.traffic_model import ring_piece
from barnraise.planning.cost.work_split import split_samples
from barnraise.planning.inputs.cluster import PlanCluster
from barnraise.planning.inputs.codecs import PlanCodec, PlanPayload, exact_codec, payload
from barnraise.planning.inputs.inputs import ModelSize, PlanLimits, StepTimes
from barnraise.planning.plan.calibration import Calibration

# Up to this number of machines all subsets are tried.
MAX_ALL_SUBSETS = 8

Group = tuple[int, ...]


class StepWork(NamedTuple):
    """Computing of a step in a group: samples and seconds of each member, and the time that hides
    communication.
    """

    samples: list[int]
    seconds: list[float]
    longest_s: float
    hideable_s: float


class PlanProblem:
    """All inputs of a prediction; members are numbered in the order of their names."""

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
        self.all_members: Group = tuple(range(self.count))
        self.names = tuple(member.name for member in cluster.members)
        self.speeds = [member.samples_per_s / calibration.compute for member in cluster.members]
        self.links = LinkMatrix(cluster)
        self.sites = find_sites(cluster, self.links)
        self.exact = exact_codec(model.wire_bytes)
        self.codecs: tuple[PlanCodec, ...] = (self.exact, *options.codecs)
        self._payloads = {codec.name: payload(codec, model.parameters) for codec in self.codecs}
        self._rings: dict[tuple[Group, str], Group] = {}
        self._tables: dict[Group, RingTable] = {}
        self._work: dict[tuple[Group, int], StepWork | None] = {}

    def payload(self, codec: PlanCodec) -> PlanPayload:
        """Return the size of the gradients in a codec."""
        return self._payloads[codec.name]

    def codec_s(self, codec: PlanCodec) -> float:
        """Return the seconds of encoding and decoding, which nothing hides."""
        return 0.0 if codec.mb_per_s is None else self.model.gradient_bytes / (codec.mb_per_s * 1e6)

    def speed(self, group: Group) -> float:
        """Return the samples per second of a group without any waiting."""
        return sum(self.speeds[member] for member in group)

    def work(self, group: Group, batch: int) -> StepWork | None:
        """Return the work of a step; None if a member would get none, unless the group is given."""
        key = (group, batch)
        if key not in self._work:
            self._work[key] = self._split_work(group, batch)
        return self._work[key]

    def _split_work(self, group: Group, batch: int) -> StepWork | None:
        profile = self.profile
        unit = min(profile.unit_size, batch)
        speeds = [self.speeds[member] for member in group]
        samples = split_samples(batch, unit, speeds)
        if min(samples) < 1 and not self.options.is_given:
            return None
        seconds = [count / speed for count, speed in zip(samples, speeds, strict=True)]
        # Gradients can be sent when the slowest member is in its last backward pass.
        send_start_s = 0.0
        for count, busy, speed in zip(samples, seconds, speeds, strict=True):
            last = busy if profile.travels == "step" else min(unit, count) / speed
            send_start_s = max(send_start_s, busy - profile.backward_share * last)
        longest = max(seconds)
        return StepWork(samples, seconds, longest, longest - send_start_s)

    def ring(self, group: Group, codec: PlanCodec) -> Group:
        """Return the order of the group's ring for the payload of this codec."""
        key = (group, codec.name if len(group) <= MAX_EXACT else "")
        if key not in self._rings:
            self._rings[key] = self._find_ring(group, codec)
        return self._rings[key]

    def _find_ring(self, group: Group, codec: PlanCodec) -> Group:
        if len(group) > MAX_EXACT:
            piece = ring_piece(self.payload(self.exact), len(group))
            return tuple(group[place] for place in ring_order(self.links.hop_costs(group, piece)))
        # Few machines share one table of all subsets; with many, each group has its own table.
        few = self.count <= MAX_ALL_SUBSETS
        among = self.all_members if few else group
        sizes = range(2, self.count + 1) if few else range(len(group), len(group) + 1)
        if among not in self._tables:
            pieces = [
                ring_piece(self.payload(candidate), size) for candidate in self.codecs for size in sizes
            ]
            costs = numpy.stack([self.links.hop_costs(among, piece) for piece in pieces])
            self._tables[among] = RingTable(costs)
        table = self.codecs.index(codec) * len(sizes) + sizes.index(len(group))
        subset = sum(1 << among.index(member) for member in group)
        return tuple(among[place] for place in self._tables[among].order(subset, table))
