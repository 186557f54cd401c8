"""Training loop of a member: pull the newest state, lease samples, push the update, repeat.

The update is kept until the hub accepts it. While the hub or the network is away, or the policy forbids
transfers, the member waits and reports why. An update is dropped only if it is too many versions behind.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from barnraise.core.errors import HubError, HubRefused, RunError
from barnraise.core.flow.retry import ReportedBackoff
from barnraise.core.host.metered import is_metered
from barnraise.core.sanitize import printable
from barnraise.core.units import format_size
from barnraise.hub.client.bandwidth_policy import A_BETTER_TIME, BandwidthPolicy, PolicyGate
from barnraise.hub.client.client import HubClient
from barnraise.hub.client.upload import push
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    Lease,
    LeaseRequest,
    RoundConfig,
    RunDescription,
    UpdateDeclaration,
    VectorLayout,
    VersionHead,
    VersionStep,
)
from barnraise.hub.protocol.vector_file import VectorForm, add_vector, encode_vector
from barnraise.hub.storage.blobs import hash_file

log = logging.getLogger("barnraise.hub")

_POLL_S = 20.0
# Of an update: the chain goes on without it, and so does its member.
_DROPPED = ("stale", "lease-over", "lease-differs")
_BLAMED = ("schema", "not-finite", "norm", "copy", "unlike", "held-out", "size")


class Contributor:
    """Client loop of one member. ``folder``: temporary files, removed after each transfer."""

    def __init__(
        self,
        client: HubClient,
        folder: Path,
        *,
        is_owner: bool = False,
        manners: BandwidthPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
        metered: Callable[[], bool] = is_metered,
    ) -> None:
        self._client, self._folder, self._is_owner = client, folder, is_owner
        courtesy = PolicyGate(manners or BandwidthPolicy(), sleep, metered)
        client.wait_for_policy = lambda: courtesy.wait(client.backoff(A_BETTER_TIME))
        self._description: RunDescription | None = None
        self._layout: VectorLayout | None = None
        self._version: int | None = None  # that the state is at
        self._residual: torch.Tensor | None = None
        self._lease: Lease | None = None
        self._others: Lease | None = None  # that another process of this member got
        self._speed = 0.0
        self.contributed = 0  # rounds
        self.samples = 0

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def terms(self) -> RoundConfig:
        """Return the configuration of the run's rounds, once the member has started."""
        assert self._description is not None
        return self._description.terms

    def start(self, layout: VectorLayout, course: HubDataOrder, state: torch.Tensor) -> Lease | None:
        """Copy the newest version into ``state`` and return the first lease; None if the run is over."""
        self._client.wait_for_policy()
        self._description, self._layout = self.ensure_base(layout, course, state), layout
        _compare(self._description, layout, course)
        self._pull(state)
        return self._next_lease(state)

    def ensure_base(self, layout: VectorLayout, course: HubDataOrder, state: torch.Tensor) -> RunDescription:
        """Return the run with its base.

        The owner pushes ``state`` if there is no base; others wait for it.
        """
        known = self._client.ask_with_retries("GET", "/v1/run", RunDescription)
        if known.layout is not None:
            return known
        return self._push_base(known, layout, course, state) if self._is_owner else self._await_base()

    def resume(self, layout: VectorLayout, course: HubDataOrder, lease: Lease) -> None:
        """Take up a lease that another process of this member got.

        It counts once, even if both deliver it.
        """
        self._client.wait_for_policy()
        self._description, self._layout = (
            self._client.ask_with_retries("GET", "/v1/run", RunDescription),
            layout,
        )
        _compare(self._description, layout, course)
        self._version, self._lease, self._others = lease.version, lease, lease

    def exchange(
        self, change: torch.Tensor, state: torch.Tensor, *, samples: int, loss: float | None, speed: float
    ) -> Lease | None:
        """Push the update of the lease and copy the next version into ``state``.

        Return the next lease; None if the run is over.
        """
        assert self._lease is not None
        self._speed = speed
        self._client.wait_for_policy()
        lease, self._lease = self._lease, None
        taken = self._push(lease, change, samples, loss)
        self._client.wait_for_policy()
        if taken:
            self.contributed += 1
            self.samples += samples
        self._pull(state, _POLL_S if taken else 0.0)
        return self._next_lease(state)

    def leave(self) -> None:
        """Give the lease back, so that other members need not wait. Never raises."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            self._client.ask("POST", "/v1/leave", RunDescription)
        except HubError as error:
            log.info("the lease could not be given back: %s", error.message)

    # the beginning

    def _push_base(
        self, description: RunDescription, layout: VectorLayout, course: HubDataOrder, state: torch.Tensor
    ) -> RunDescription:
        """Push the owner's weights as version 0."""
        terms = description.terms
        form = VectorForm(layout.numel, terms.chunk, terms.base_codec, 0)
        with tempfile.TemporaryDirectory(dir=self._folder) as room:
            path = Path(room) / "base"
            with path.open("wb") as file:
                encode_vector(file, state, form)
            sha256, size = hash_file(path), path.stat().st_size
            log.warning("this machine's model is the base of the run (%s)", format_size(size))
            declaration = UpdateDeclaration(
                kind="base", sha256=sha256, size=size, layout=layout, course=course
            )
            push(self._client, declaration, path)
        return self._client.ask_with_retries("GET", "/v1/run", RunDescription)

    def _await_base(self) -> RunDescription:
        waiting = self._client.backoff("the hub's owner, whose model the run begins with")
        while True:
            waiting.pause("it is not there yet")
            description = self._client.ask_with_retries("GET", "/v1/run", RunDescription)
            if description.layout is not None:
                return description

    # the chain

    def _pull(self, state: torch.Tensor, wait_s: float = 0.0) -> VersionHead:
        """Apply all steps to the newest version.

        If a proxy denies or changes a blob, ask the hub again: it may have removed the blob and offer a newer
        base.
        """
        waiting = self._client.backoff()
        while True:
            head = self._client.head(self._version, wait_s)
            if all(self._apply_step(step, state, waiting) for step in head.steps):
                return head

    def _apply_step(self, step: VersionStep, state: torch.Tensor, waiting: ReportedBackoff) -> bool:
        """Apply one step to the state and return True. After a failed download, pause and return False."""
        assert self._description is not None
        assert self._layout is not None
        form = VectorForm(self._layout.numel, self._description.terms.chunk, step.codec, step.version)
        if step.size > form.max_bytes:
            raise HubError(f"version {step.version} is larger than it can be", hint="Join again.")
        with tempfile.TemporaryDirectory(dir=self._folder) as room:
            path = Path(room) / step.sha256
            try:
                self._client.fetch(step.sha256, path, size=step.size)
            except HubError as error:
                waiting.pause(f"{error.message}. {error.hint}")
                return False
            add_vector(path, form, state, is_base=step.kind == "base")
        self._version = step.version
        return True

    def _next_lease(self, state: torch.Tensor) -> Lease | None:
        """Return the next lease; None if the run is over.

        After a delivery, wait for the round to close first.
        """
        waiting = self._client.backoff("samples to train")
        others = self._client.backoff("the others of this round")
        while True:
            assert self._version is not None
            request = LeaseRequest(samples_per_s=self._speed, version=self._version)
            try:
                self._lease = self._client.ask_with_retries("POST", "/v1/leases", Lease, request)
            except HubRefused as error:
                if error.kind == "finished":
                    return None
                if error.kind not in ("behind", "delivered", "all-lent", "no-base", "too-few"):
                    raise
                if error.kind == "delivered":
                    others.note(self._pull(state, _POLL_S).waits_for or "the round is not closed yet")
                    continue
                if error.kind != "behind":
                    waiting.pause(error.message, error.retry_s)
                self._pull(state)
                continue
            return self._lease

    # handing over

    def _push(self, lease: Lease, change: torch.Tensor, samples: int, loss: float | None) -> bool:
        """Push an update to the hub. Return True if the hub accepted it."""
        assert self._description is not None
        terms = self._description.terms
        form = VectorForm(change.numel(), terms.chunk, terms.codec, lease.version)
        residual = torch.zeros_like(change) if self._residual is None else self._residual.clone()
        with tempfile.TemporaryDirectory(dir=self._folder) as room:
            path = Path(room) / "update"
            with path.open("wb") as file:
                encode_vector(file, change, form, residual)
            sha256, size = hash_file(path), path.stat().st_size
            declaration = UpdateDeclaration(
                sha256=sha256,
                size=size,
                lease=lease.id,
                version=lease.version,
                samples=min(samples, lease.samples),
                loss=loss,
            )
            try:
                progress = push(self._client, declaration, path)
            except HubRefused as error:
                if error.kind not in (*_DROPPED, *_BLAMED):
                    raise
                if error.kind == "lease-over" and lease == self._others:
                    log.warning("the resumed lease was already delivered or has ended")
                else:
                    log.warning("the update of this round was not accepted: %s", error.message)
                return False
        self._residual = residual
        if progress.clipped < 1.0:
            log.warning(
                "this update is larger than usual and is scaled by %.2g, unless the others are as large",
                progress.clipped,
            )
        return True


def _compare(description: RunDescription, layout: VectorLayout, course: HubDataOrder) -> None:
    """Raise RunError unless this machine's model and data order are those of the hub."""
    hub_layout, own_layout = description.layout, layout
    hint = "Run the files of the invite unchanged, with the versions of packages that the hub's owner has."
    assert hub_layout is not None
    for hub_entry, own_entry in zip(hub_layout.entries, own_layout.entries, strict=False):
        if hub_entry != own_entry:
            raise RunError(
                f"the hub's model has {printable(hub_entry.name)} {list(hub_entry.shape)} {hub_entry.dtype} "
                f"where this one has {own_entry.name} {list(own_entry.shape)} {own_entry.dtype}",
                hint=hint,
            )
    if len(hub_layout.entries) != len(own_layout.entries):
        raise RunError(
            f"the hub's model has {len(hub_layout.entries)} tensors, this one {len(own_layout.entries)}",
            hint=hint,
        )
    if description.course != course:
        raise RunError(
            f"the hub's run is over {description.course}, this machine's over {course}",
            hint="Give every machine the same data set, seed and batch size.",
        )
