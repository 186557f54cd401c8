"""Exchange of gradients after the passes of a step: between replicas, which add them, and with mirrors.

Replicas have trained other micro-batches of the same step. Each adds the gradients of all in the order of the
pipelines, so that all get the same bits. Mirrors get the sums.
"""

from __future__ import annotations

import torch

from barnraise.planning.split.mirror_placement import MirrorPlacement
from barnraise.planning.split.replica_placement import SplitPlacement
from barnraise.training.group.interface import TrainingCollectives
from barnraise.training.pipeline.members.member_stage import MemberStage


def add_replicas(group: TrainingCollectives, held: MemberStage, placement: SplitPlacement) -> None:
    """Replace the gradients of this member's stage by the sums over all pipelines."""
    own_pipeline = placement.pipeline_of(group.rank)
    if own_pipeline is None or len(placement.pipelines) == 1:
        return
    own = held.own
    peers = [
        (number, rank, held.names_of_units(held.shared_units(run)))
        for number, pipeline in enumerate(placement.pipelines)
        for rank, run in zip(pipeline.order, pipeline.runs, strict=True)
        if number != own_pipeline
    ]
    works, arriving = [], []
    for number, rank, names in peers:
        if names:
            received = torch.empty(own.gradient_bytes(names), dtype=torch.uint8)
            works += [group.send_async(own.pack_gradients(names), rank), group.receive_async(received, rank)]
            arriving.append((number, names, received))
    for work in works:
        work.wait()
    parts = {name: {own_pipeline: own.gradient(name)} for name in own.parameters}
    for number, names, received in arriving:
        for name, gradient in own.unpacked(received, names).items():
            parts[name][number] = gradient
    for name, by_pipeline in parts.items():
        first, *others = (by_pipeline[number] for number in sorted(by_pipeline))
        total = first.clone()
        for gradient in others:
            total += gradient
        own.parameters[name].grad = total


def send_to_mirrors(group: TrainingCollectives, held: MemberStage, mirrors: MirrorPlacement) -> None:
    """Send the gradients of this stage to its mirror, and receive those that this member mirrors."""
    own, mirror = held.own, mirrors.mirrors[group.rank]
    received = {
        rank: torch.empty(state.gradient_bytes(), dtype=torch.uint8) for rank, state in held.mirrors.items()
    }
    works = []
    if mirror is not None and own.gradient_bytes():
        works.append(group.send_async(own.pack_gradients(), mirror))
    works += [group.receive_async(packed, rank) for rank, packed in received.items() if packed.numel()]
    for work in works:
        work.wait()
    for rank, packed in received.items():
        state = held.mirrors[rank]
        for name, gradient in state.unpacked(packed).items():
            state.parameters[name].grad = gradient
