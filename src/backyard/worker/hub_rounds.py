"""A session's rounds beyond its group, at a hub: the session's words for what a contributor does."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import torch

from backyard.core.config import load_settings
from backyard.hub.client import HubClient
from backyard.hub.contributing import Contributor
from backyard.hub.courtesy import Manners, Pace, QuietHours
from backyard.hub.messages import Course, Layout, Lease
from backyard.hub.seating import VARIABLE, read_seat
from backyard.training.beyond import Form, Handed, Span, Task

_EPOCHS = 1 << 20  # the script's own loop says when it is enough


def rounds_from_environment() -> HubRounds:
    """In a process that was started for a machine's seat at a hub."""
    seat = read_seat(Path(os.environ[VARIABLE]))
    wishes = load_settings().contributing
    manners = Manners(
        uplink_bytes_s=wishes.uplink_mbps * 125_000,
        metered=wishes.metered,
        quiet=QuietHours.parse(wishes.quiet_hours or ""),
    )
    logging.basicConfig(level=logging.WARNING, format="backyard: %(message)s")
    client = HubClient(seat.addresses, seat.hub_id, seat.member_key, pace=Pace(manners.uplink_bytes_s))
    contributor = Contributor(client, Path(seat.folder), is_owner=seat.is_owner, manners=manners)
    # Asked to end, it gives back what it has leased: others need not wait for it.
    atexit.register(contributor.leave)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return HubRounds(contributor, only_begins=seat.only_begins)


class HubRounds:
    """What `backyard.training` calls Beyond."""

    def __init__(self, contributor: Contributor, *, only_begins: bool = False) -> None:
        self._contributor, self._only_begins = contributor, only_begins

    def begin(self, form: Form, state: torch.Tensor) -> Task:
        layout = msgspec.convert({"entries": form.layout}, Layout)
        course = Course(
            samples=form.samples, batch=form.batch, seed=form.seed, shuffle=form.shuffle, epochs=_EPOCHS
        )
        if self._only_begins:
            self._contributor.found(layout, course, state)
            sys.exit(0)
        return _task(self._contributor.begin(layout, course, state))

    def exchange(self, handed: Handed, state: torch.Tensor) -> Task:
        lease = self._contributor.exchange(
            handed.change, state, samples=handed.samples, loss=handed.loss, speed=handed.speed
        )
        return _task(lease)


def _task(lease: Lease | None) -> Task:
    if lease is None:
        return Task((), 0, 1)
    spans = tuple(Span(span.epoch, span.first, span.last) for span in lease.spans)
    return Task(spans, lease.covered, lease.members)
