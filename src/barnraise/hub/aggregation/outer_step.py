"""The outer step: how a closed round becomes the next version. Blobs are written first, the log last.

Everything here blocks and runs in a thread, never in the hub's event loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from barnraise.hub.aggregation.aggregate import (
    MergeInput,
    OuterState,
    merge_chunk,
    take_outer_step,
    write_base,
)
from barnraise.hub.aggregation.aggregator import ClosedRound, RoundFigures, RoundResult
from barnraise.hub.aggregation.update_checks import Sketch, UpdateVerdict, judge_round, needs_sketches
from barnraise.hub.aggregation.update_figures import draw_key, measure, sketch_round
from barnraise.hub.protocol.messages import RoundConfig, VectorLayout, VersionStep
from barnraise.hub.protocol.vector_file import VectorFile, VectorForm
from barnraise.hub.rounds.state_machine import staleness_weight
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.log import AcceptedUpdate, CommittedRound, Contribution


class OuterStep:
    """Aggregator of a hub: merges a round and takes the outer optimizer's step."""

    def __init__(self, blobs: BlobStore, terms: RoundConfig, layout: VectorLayout) -> None:
        torch.set_num_threads(1)  # chunks are worked on side by side instead
        self._blobs, self._terms, self._numel = blobs, terms, layout.numel
        self._sketch_key = draw_key()
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="hub-merge")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def max_update_bytes(self) -> int:
        """Return the maximum size of an update file."""
        return self._form(self._terms.codec, 0).max_bytes

    def measure(self, path: Path, version: int) -> RoundFigures:
        """Return norm and sketch of an update that starts from this version."""
        return measure(path, self._form(self._terms.codec, version), self._sketch_key)

    def merge(self, closed: ClosedRound) -> RoundResult:
        """Return the next version; all its blobs are on disk."""
        terms, number = self._terms, closed.head.number + 1
        inputs, parts, refused = self.merge_inputs(closed)
        if not inputs:
            return RoundResult((), (), refused)
        trim = self.trim_fraction(closed, parts)
        outer = OuterState(self._blob(closed.head.momentum), self._blob(closed.head.feedback))
        outcome = take_outer_step(
            self._blobs,
            self._form(terms.delta_codec, number),
            lambda index: merge_chunk(inputs, index, trim),
            outer,
            terms.rate,
            terms.momentum,
            self._pool,
        )
        base = None
        if number % terms.base_every == 0:
            base = self._new_base(number, closed.chain, outcome.step)
        rule = "weighted mean" if trim is None else f"mean without {trim:.0%} on each side"
        version = CommittedRound(
            number=number,
            step=outcome.step,
            base=base,
            momentum=outcome.momentum,
            feedback=outcome.feedback,
            time=closed.time,
            rule=rule,
            members=len(parts),
            samples=sum(part.samples for part in parts),
            loss=mean_loss(parts),
        )
        return RoundResult((version,), parts, refused)

    def merge_inputs(
        self, closed: ClosedRound
    ) -> tuple[list[MergeInput], tuple[Contribution, ...], dict[str, UpdateVerdict]]:
        """Return the updates to merge with their weights, their contributions, and the refused updates."""
        sketches = self._sketches(closed)
        verdicts = judge_round(closed.arrivals, closed.strangers, self._terms, closed.seen, sketches)
        refused = {name: verdict for name, verdict in verdicts.items() if verdict.kind}
        inputs, parts = [], []
        for arrival in closed.arrivals:
            update = arrival.update
            if update.id in refused:
                continue
            scale = verdicts[update.id].scale if update.id in verdicts else 1.0
            behind = closed.head.number - update.version
            weight = update.samples * staleness_weight(behind)
            file = self._update_file(arrival)
            invite = closed.invites.get(update.node) or update.node
            is_strangers = update.node in closed.strangers
            inputs.append(MergeInput(file, weight, scale, invite, is_strangers))
            parts.append(
                Contribution(
                    node=update.node,
                    lease=update.lease,
                    samples=update.samples,
                    spans=arrival.spans,
                    behind=behind,
                    weight=weight,
                    scale=scale,
                    sha256=arrival.sha256,
                    loss=arrival.loss,
                    merged=arrival.merged,
                )
            )
        return inputs, tuple(parts), refused

    def _sketches(self, closed: ClosedRound) -> dict[str, Sketch]:
        """Return sketches of the round's updates by update, if a check needs them."""
        if not needs_sketches(closed.arrivals, closed.strangers):
            return {}
        sketches = sketch_round([self._update_file(arrival) for arrival in closed.arrivals], self._pool)
        names = (arrival.update.id for arrival in closed.arrivals)
        return dict(zip(names, sketches, strict=False))  # there are none of a small model

    def trim_fraction(self, closed: ClosedRound, parts: Sequence[Contribution]) -> float | None:
        """Return the fraction that `merge_chunk` trims on each side; None if no stranger takes part."""
        counted = {part.sha256 for part in parts}
        arrivals = tuple(arrival for arrival in closed.arrivals if arrival.sha256 in counted)
        return self._terms.trim if closed._replace(arrivals=arrivals).has_strangers else None

    def _new_base(self, number: int, chain: Sequence[CommittedRound], last: VersionStep) -> VersionStep:
        base = chain[0].base
        assert base is not None
        steps = [version.step for version in chain[1:]] + [last]
        return write_base(
            self._blobs,
            self._form(self._terms.base_codec, number),
            self._file(base),
            [self._file(step) for step in steps],
            self._pool,
        )

    def _file(self, step: VersionStep) -> VectorFile:
        return VectorFile(self._blobs.path(step.sha256), self._form(step.codec, step.version))

    def _update_file(self, arrival: AcceptedUpdate) -> VectorFile:
        form = self._form(self._terms.codec, arrival.update.version)
        return VectorFile(self._blobs.path(arrival.sha256), form)

    def _form(self, codec: str, version: int) -> VectorForm:
        return VectorForm(self._numel, self._terms.chunk, codec, version)

    def _blob(self, name: str | None) -> Path | None:
        return None if name is None else self._blobs.path(name)


def mean_loss(parts: Sequence[Contribution]) -> float | None:
    """Return the mean of the reported losses, weighted by samples; None if there is none."""
    reported = [(part.samples, part.loss) for part in parts if part.loss is not None]
    total = sum(samples for samples, _ in reported)
    return sum(samples * loss for samples, loss in reported) / total if total else None


def first_version(base: VersionStep, time: float) -> CommittedRound:
    """Return version 0, the owner's base."""
    return CommittedRound(number=0, step=base, base=base, time=time, rule="the owner's base")


def check_base(path: Path, layout: VectorLayout, terms: RoundConfig) -> None:
    """Raise ProtocolError unless the file is a complete and finite state."""
    measure(path, VectorForm(layout.numel, terms.chunk, terms.base_codec, 0), draw_key())
