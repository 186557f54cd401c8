"""Adapter of the hub's client to the interface that a session has for a parameter server."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
from pathlib import Path

import msgspec
import torch

from barnraise.core.config import load_settings
from barnraise.core.flow.console_log import install_process_log
from barnraise.core.flow.termination import on_termination
from barnraise.core.flow.uplink_limiter import UplinkLimiter
from barnraise.hub.client.bandwidth_policy import policy_from_settings
from barnraise.hub.client.client import HubClient
from barnraise.hub.client.contributor import Contributor
from barnraise.hub.client.credentials import (
    SITE_VARIABLE,
    VARIABLE,
    MemberCredentials,
    parse_credentials,
    read_credentials,
)
from barnraise.hub.protocol.messages import HubDataOrder, Lease, VectorLayout, decode_message, encode_message
from barnraise.identity.node_id import NodeId
from barnraise.training.hub.parameter_server import LeasedWork, ModelSpec, RoundUpdate, SampleRange

_EPOCHS = 1 << 20  # the script's own loop says when it is enough


def rounds_from_environment() -> HubAdapter:
    """Create the adapter in a process that was started for one member of a hub."""
    seat = read_credentials(Path(os.environ[VARIABLE]))
    contributor = _contributor(seat, Path(seat.folder))
    # Asked to end, it gives back what it has leased: others need not wait for it.
    atexit.register(contributor.leave)
    on_termination(lambda number, frame: sys.exit(128 + number))
    return HubAdapter(contributor, only_begins=seat.only_begins)


def site_rounds_from_environment() -> HubAdapter:
    """Create the adapter on a machine of a site. The site shares its lease, which stays when this machine
    leaves.
    """
    seat = parse_credentials(os.environ[SITE_VARIABLE])
    kept = os.environ.get(
        "BARNRAISE_CHECKPOINTS"
    )  # in the run's folder, and gone with it; not in a container
    folder = Path(kept).parent / "hub" if kept else Path(tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    return HubAdapter(_contributor(seat, folder))


def _contributor(seat: MemberCredentials, folder: Path) -> Contributor:
    manners = policy_from_settings(load_settings().contributing)
    install_process_log(logging.WARNING, "barnraise: %(message)s")
    pace = UplinkLimiter(manners.uplink_bytes_s)
    client = HubClient(
        seat.addresses,
        seat.hub_id,
        seat.member_key,
        pinned=seat.pinned,
        pace=pace,
        store=seat.store,
        proxy_token=seat.proxy_token,
        led_from=seat.led_from,
        root=None if seat.root is None else NodeId(seat.root),
    )
    return Contributor(client, folder, is_owner=seat.is_owner, manners=manners)


class HubAdapter:
    """Parameter server of a session, backed by a hub's HTTP API."""

    def __init__(self, contributor: Contributor, *, only_begins: bool = False) -> None:
        self._contributor, self._only_begins = contributor, only_begins

    def begin(self, spec: ModelSpec, state: torch.Tensor) -> LeasedWork:
        layout, course = _declared(spec)
        if self._only_begins:
            self._contributor.ensure_base(layout, course, state)
            sys.exit(0)
        return self._work(self._contributor.start(layout, course, state))

    def exchange(self, update: RoundUpdate, state: torch.Tensor) -> LeasedWork:
        lease = self._contributor.exchange(
            update.change, state, samples=update.samples, loss=update.loss, speed=update.speed
        )
        return self._work(lease)

    def continue_lease(self, spec: ModelSpec, lease: LeasedWork) -> None:
        self._contributor.resume(*_declared(spec), decode_message(Lease, lease.token))

    def _work(self, lease: Lease | None) -> LeasedWork:
        return leased_work(lease, is_linear=self._contributor.terms.linear_scaling)


def _declared(form: ModelSpec) -> tuple[VectorLayout, HubDataOrder]:
    layout = msgspec.convert({"entries": form.layout}, VectorLayout)
    course = HubDataOrder(
        samples=form.samples, batch=form.batch, seed=form.seed, shuffle=form.shuffle, epochs=_EPOCHS
    )
    return layout, course


def leased_work(lease: Lease | None, *, is_linear: bool) -> LeasedWork:
    """Return a lease as the session trains it. Without samples, the training is complete.

    ``is_linear``: each member takes steps of a whole batch, and multiplies its learning rate by the members.
    Otherwise all members take one batch together.
    """
    if lease is None:
        return LeasedWork((), 0, 1)
    spans = tuple(SampleRange(span.epoch, span.first, span.last) for span in lease.spans)
    token = encode_message(lease)
    if is_linear:
        return LeasedWork(spans, lease.covered, 1, token, float(lease.members))
    return LeasedWork(spans, lease.covered, lease.members, token)
