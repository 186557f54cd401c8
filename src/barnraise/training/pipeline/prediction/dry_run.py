"""End of the dry run of a split model: what was measured is written for the command line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from barnraise.agent_client.profile import PROFILE_FILE, PartBytes, SplitProfile, SplitWorker, encode
from barnraise.core.errors import CollectiveError
from barnraise.planning.split.stage_placement import PartSize
from barnraise.training.data.loader import MicroBatchLoader
from barnraise.training.group.interface import GroupManager
from barnraise.training.pipeline.holdings import MemberHoldings
from barnraise.training.pipeline.prediction.forecast import SplitForecast
from barnraise.training.recovery.failures import raise_if_permanent

log = logging.getLogger("barnraise.training")

_MAX_NAME = 128


class ReportingLoop(Protocol):
    """Step loop that exchanges reports before anything is placed."""

    forecast: SplitForecast

    def exchange_reports(self) -> Sequence[MemberHoldings]:
        """Return what each member of the group reports."""


def end_dry_run(loop: ReportingLoop, manager: GroupManager, data: MicroBatchLoader) -> NoReturn:
    """Exchange what the machines have measured, write it on the main worker, and exit the script."""
    file = Path.cwd() / PROFILE_FILE
    error: CollectiveError | None = None
    while True:
        manager.join_next_group(error)
        try:
            members = loop.exchange_reports()
            break
        except CollectiveError as failure:
            raise_if_permanent(failure)
            log.info("the group failed in a dry run: %s", failure.message)
            error = failure
    if manager.rank == 0:
        file.write_bytes(encode(profile_of(loop.forecast, members, manager, data)))
    raise SystemExit(0)


def profile_of(
    forecast: SplitForecast,
    members: Sequence[MemberHoldings],
    manager: GroupManager,
    data: MicroBatchLoader,
) -> SplitProfile:
    """Return the measurements of a group as the command line reads them."""
    group, parts = forecast.group, forecast.parts
    assert group is not None
    microbatches = data.microbatches(0)
    return SplitProfile(
        before=_bytes_of(parts.before),
        blocks=tuple(map(_bytes_of, parts.blocks)),
        after=_bytes_of(parts.after),
        boundary_bytes=parts.boundary_bytes,
        tied_bytes=parts.tied_bytes,
        sent_bytes=forecast.sent_bytes,
        batch=sum(microbatch.size for microbatch in microbatches),
        batches=len(microbatches),
        order=forecast.order,
        workers=tuple(
            SplitWorker(
                name=manager.name_of(rank)[:_MAX_NAME],
                memory_bytes=member.memory_bytes,
                **speed.block._asdict(),
                host_bytes=speed.host_bytes,
                host_rate=speed.host_rate,
            )
            for rank, (member, speed) in enumerate(zip(members, group.members, strict=True))
        ),
        rates=group.links.rates,
        latencies=group.links.latencies,
    )


def _bytes_of(part: PartSize) -> PartBytes:
    return PartBytes(part.frozen_bytes, part.trained_bytes, part.activation_bytes)
