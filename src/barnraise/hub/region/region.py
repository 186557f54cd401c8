"""Regional hub, for hierarchical aggregation: a member of its parent that trains with its own members.

It leases samples from its parent and leases them to its members. It merges their updates into one with the
sum of their samples, and pushes that to the parent. Its versions are copies of the parent's, and it serves
their blobs. So the parent's traffic depends on the number of regions, not of members.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from barnraise.artifacts import FolderLimits
from barnraise.core.errors import HubError, HubRefused
from barnraise.core.flow.supervised_task import run_until_done
from barnraise.hub.aggregation.aggregate import OuterState, merge_chunk, take_outer_step
from barnraise.hub.aggregation.aggregator import ClosedRound, RoundResult
from barnraise.hub.aggregation.outer_step import OuterStep, mean_loss
from barnraise.hub.client.client import HubClient
from barnraise.hub.client.upload import push
from barnraise.hub.mirror.blob_fetcher import BlobFetcher
from barnraise.hub.protocol.messages import (
    Lease,
    LeaseRequest,
    RoundConfig,
    RunDescription,
    UpdateDeclaration,
    VectorLayout,
    VersionStep,
)
from barnraise.hub.rounds import state_machine
from barnraise.hub.rounds.sample_pool import merge_spans
from barnraise.hub.server.hub import Hub
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import create_hub
from barnraise.hub.storage.log import CommittedRound, Contribution
from barnraise.identity.node_id import NodeId

_POLL_S = 20.0
_PAUSE_S = 2.0
_SENT_AWAY_S = 60.0
GATHER_S = 1.0
_SHORTER = 0.7  # of the parent's round: the region's own must fit into it
logger = logging.getLogger(__name__)


class ParentHub:
    """The parent hub as a region sees it.

    Every method blocks. A lock serializes the thread that pushes and the one that polls.
    """

    def __init__(self, client: HubClient, blobs: BlobStore, folder: Path, limits: FolderLimits) -> None:
        self._client, self._blobs = client, blobs
        folder.mkdir(parents=True, exist_ok=True)
        self._fetcher = BlobFetcher(client, blobs, folder, limits)
        self._turn = threading.Lock()
        self.lease: Lease | None = None

    def describe(self) -> RunDescription:
        with self._turn:
            return self._client.ask_with_retries("GET", "/v1/run", RunDescription)

    def steps(self, after: int | None, wait: float = 0.0) -> tuple[VersionStep, ...]:
        """Return the steps after a version; their blobs are here then."""
        with self._turn:
            steps = self._client.head(after, wait).steps
            for step in steps:
                self._fetcher.fetch(step.sha256, size=step.size)
            return steps

    def take_lease(self, rate: float, version: int) -> Lease:
        message = LeaseRequest(samples_per_s=rate, version=version)
        with self._turn:
            self._client.wait_for_policy()  # or the others of the round would wait for a region that is quiet
            self.lease = self._client.ask_with_retries("POST", "/v1/leases", Lease, message)
            return self.lease

    def push(self, declaration: UpdateDeclaration) -> None:
        with self._turn:
            push(self._client, declaration, self._blobs.path(declaration.sha256))

    def fetch_code(self, name: str | None) -> tuple[str, ...]:
        with self._turn:
            return () if name is None else self._fetcher.fetch_code(name)


class RegionAggregator(OuterStep):
    """Aggregator of a region: sends the mean of a round to the parent, with error feedback."""

    def __init__(self, blobs: BlobStore, terms: RoundConfig, layout: VectorLayout, parent: ParentHub) -> None:
        super().__init__(blobs, terms, layout)
        self._parent = parent
        self._feedback: str | None = None
        self._spent: set[str] = set()

    def merge(self, closed: ClosedRound) -> RoundResult:
        """Push the mean of the round to the parent, and return the parent's next versions."""
        lease = self._parent.lease
        if lease is None or lease.version != closed.head.number:
            return RoundResult((), (), {})  # there is nothing that these updates could count for
        inputs, parts, refused = self.merge_inputs(closed)
        if not inputs:
            return RoundResult((), (), refused)
        trim = self.trim_fraction(closed, parts)
        outcome = take_outer_step(  # without momentum and with this rate it is the mean itself
            self._blobs,
            self._form(self._terms.codec, lease.version),
            lambda index: merge_chunk(inputs, index, trim),
            OuterState(None, self._blob(self._feedback)),
            -1.0,
            0.0,
            self._pool,
        )
        declaration = declare_update(outcome.step, lease, parts, has_strangers=trim is not None)
        # Not removed here: the mean of one update may be that update, byte by byte, which the log names.
        self._spent |= {
            outcome.step.sha256,
            outcome.momentum,
            outcome.feedback,
            self._feedback or outcome.feedback,
        }
        is_refused = False
        try:
            self._parent.push(declaration)
        except HubRefused as error:
            logger.warning("the parent refused the region's update: %s", error.message)
            is_refused = True
            self._parent.lease = None  # the region takes another one
        self._feedback = outcome.feedback
        steps: tuple[VersionStep, ...] = ()
        while not steps:
            steps = self._next_steps(closed.head.number)
            if is_refused:  # there may be no version after this one before the region delivers again
                break
        versions = versions_from_steps(self._parent, steps, self._terms.base_every, closed.time)
        if is_refused:
            return RoundResult(tuple(versions), (), refused, self._take_spent())
        first, *others = versions
        counted = msgspec.structs.replace(
            first, members=len(parts), samples=declaration.samples, loss=declaration.loss
        )
        return RoundResult((counted, *others), parts, refused, self._take_spent())

    def _take_spent(self) -> frozenset[str]:
        spent, self._spent = frozenset(self._spent) - {self._feedback or ""}, set()
        return spent

    def _next_steps(self, after: int) -> tuple[VersionStep, ...]:
        """Return the parent's next steps; none if a blob could not be fetched.

        The accepted update must not be merged and pushed again because of that.
        """
        try:
            return self._parent.steps(after, _POLL_S)
        except HubRefused:
            raise
        except HubError as error:
            logger.warning("the parent's version did not arrive: %s. %s", error.message, error.hint)
            time.sleep(_PAUSE_S)
            return ()


def declare_update(
    step: VersionStep, lease: Lease, parts: Sequence[Contribution], *, has_strangers: bool = False
) -> UpdateDeclaration:
    """Declare the merged update of a region, and whether strangers took part in it.

    Adjacent spans are joined, because thousands of leases would not fit a message.
    """
    return UpdateDeclaration(
        sha256=step.sha256,
        size=step.size,
        lease=lease.id,
        version=lease.version,
        samples=sum(part.samples for part in parts),
        trained=merge_spans(span for part in parts for span in part.spans),
        loss=mean_loss(parts),
        merged=sum(part.merged for part in parts),
        has_strangers=has_strangers,
    )


def regional_terms(terms: RoundConfig) -> RoundConfig:
    """Return the round configuration of a region, whose rounds must fit into the parent's.

    A region is one member of its parent, which decides when the first round starts.
    """
    return msgspec.structs.replace(terms, round_s=_SHORTER * terms.round_s, wait_for=1)


def versions_from_steps(
    parent: ParentHub, steps: Sequence[VersionStep], base_every: int, time: float
) -> list[CommittedRound]:
    """Return the parent's steps as versions of the region, with a base where the parent has one."""
    versions = []
    for step in steps:
        base = step if step.kind == "base" else None
        if base is None and step.version % base_every == 0:
            full_steps = parent.steps(None)
            base = full_steps[0] if full_steps and full_steps[0].version == step.version else None
        versions.append(
            CommittedRound(number=step.version, step=step, base=base, time=time, rule="the parent's version")
        )
    return versions


def create_region(
    directory: Path, parent: ParentHub, description: RunDescription, owner: NodeId, above: NodeId
) -> None:
    """Create a hub with the parent's run and code. ``above``: the parent's id."""
    kept = parent.fetch_code(description.code)
    terms = regional_terms(description.terms)
    create_hub(directory, description.name, owner, terms, code=description.code, kept=kept, parent=above)


async def run_region(hub: Hub, parent: ParentHub) -> None:
    """Lease samples from the parent and offer them to the members, until the run is over."""
    description: RunDescription | None = None

    async def turn() -> bool:
        nonlocal description
        try:
            if description is None or description.layout is None:
                description = await asyncio.to_thread(parent.describe)
            if description.layout is not None:
                return await _run_round(hub, parent, description)
            await asyncio.sleep(_PAUSE_S)
        except HubRefused as error:
            if error.status == 403:  # sent away, or in quarantine: only its owner can change that
                logger.warning("the parent rejects this region: %s. %s", error.message, error.hint)
                await asyncio.sleep(_SENT_AWAY_S)
            await asyncio.sleep(max(error.retry_s, 0.1))
        return False

    await run_until_done(turn, "a round of the region failed", _PAUSE_S)


async def _run_round(hub: Hub, parent: ParentHub, description: RunDescription) -> bool:
    """Run one round of the region. Return True if the run is over."""
    await _sync(hub, parent, description)
    assert hub.version is not None
    version, wished = hub.version, await _wished_samples(hub, is_first=parent.lease is None)
    if not wished:  # a lease without members would only keep the others waiting
        return False
    try:
        lease = await asyncio.to_thread(parent.take_lease, wished / description.terms.round_s, version)
    except HubRefused as error:
        if error.kind != "finished":
            raise
        await _sync(hub, parent, description)
        await hub.step(state_machine.ParentFinished())
        return True
    hub.covered = lease.covered  # by others, too
    await hub.step(state_machine.SamplesSupplied(lease.spans))
    await hub.wait_until(lambda: hub.version != version or parent.lease is None, lease.void_s)
    return False


async def _wished_samples(hub: Hub, *, is_first: bool) -> int:
    """Return the samples that members would train on in a round.

    Before the first round, wait until no more members ask, so that all get a share.
    """
    if is_first or not hub.state.wishes:
        seen = -1
        while len(hub.state.wishes) != seen:
            seen = len(hub.state.wishes)
            await asyncio.sleep(GATHER_S)
    return sum(hub.state.wishes.values())


async def _sync(hub: Hub, parent: ParentHub, description: RunDescription) -> None:
    """Copy the parent's newest version if the region is behind."""
    assert description.layout is not None
    assert description.course is not None
    steps = await asyncio.to_thread(parent.steps, hub.version)
    if steps and not hub.state.closing:
        every = description.terms.base_every
        versions = await asyncio.to_thread(versions_from_steps, parent, steps, every, hub.clock())
        await hub.adopt_versions(versions, description.layout, description.course)
