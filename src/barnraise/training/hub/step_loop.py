"""Step loop of a group at a hub: steps of a lease are ordinary, and between two leases is an exchange step.

In an exchange step, the first worker that can talks to the hub. Its answer is all-reduced like gradients,
to which the others add zeros, and is committed when all workers hold it. So a version reaches all workers or
none. If the worker that talks dies, the next one asks again; the hub counts a lease once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from blake3 import blake3

from barnraise.checkpoint.serialization import tensor_bytes
from barnraise.core.decoding import decode
from barnraise.core.errors import BarnraiseError, CollectiveError, ProtocolError, RunError
from barnraise.core.installation import install_hint
from barnraise.training.gradients.reducer import BUCKET_BYTES
from barnraise.training.hub.group_client import (
    UNREADABLE,
    GroupHubClient,
    HubAnswer,
    answer_from_tensors,
    decode_lease,
    encode_lease,
)
from barnraise.training.recovery.live_recovery import CommittedStep
from barnraise.training.steps.commit_vote import CommitVote
from barnraise.training.steps.step_loop import StepLoop

log = logging.getLogger("barnraise.training")

_POLL_S = 0.5  # interval at which workers that wait for the hub exchange their status
_REPORT_S = 60.0


class _HubStatus(msgspec.Struct, frozen=True, array_like=True):
    """Status of a worker that waits for the hub."""

    step: int
    newest_generation: int
    can_request: bool
    lease: bytes = b""  # that the hub gave to it; empty without an answer


_statuses = msgspec.msgpack.Decoder(_HubStatus)


class HubStepLoop(StepLoop):
    """Step loop with exchange steps; all workers hold the same state of ``client``."""

    can_unfreeze = False  # the hub knows the layout of the model

    def __init__(self, client: GroupHubClient, *parts: Any) -> None:
        super().__init__(*parts)
        self._client = client
        self._answer: HubAnswer | None = None  # result of an exchange, until it is committed
        self._lease_start = 0  # position in the metrics
        self._failed_at = -1  # the step at which this worker could not talk to the hub
        self._trained_steps = 0  # of leases, since this process started

    @property
    def round_start(self) -> int:
        """Return the steps of this group: those of other groups are in between."""
        return self._trained_steps

    def has_reached(self, target: int) -> bool:
        """Tell whether this group has committed ``target`` steps."""
        return self._trained_steps >= target

    def exchange_if_due(self) -> bool:
        """Run an exchange step if the lease is trained. Return True if it was."""
        if not self._client.is_due:
            return False
        self.finish_step()
        return True

    def wait_for_lease(self) -> None:
        """Run exchange steps until there is something to train, or the training is complete."""
        while not self._client.has_lease:
            self.finish_step()

    def finish_step(self) -> None:
        """Finish a step of the lease, or run an exchange step if the lease is trained."""
        if not self._client.is_due:
            super().finish_step()
            return
        self.check_can_train()
        try:
            votes = self._exchange()
        except CollectiveError as error:
            log.info("the hub's answer did not reach all workers: %s", error.message)
            self.join_next_group(error)
            return
        if votes is None:
            self.join_next_group()
        else:
            self._commit(votes)

    def _exchange(self) -> list[CommitVote] | None:
        """Get the hub's answer and all-reduce it. Return None if the group changes first."""
        received = self._wait_for_hub()
        if received is None:
            return None
        encoded_lease, answer = received
        lease = decode_lease(encoded_lease)
        if lease is None:
            raise ProtocolError(UNREADABLE)
        total = torch.zeros(self._client.size) if answer is None else answer.state.clone()
        group = self._manager.group
        for work in [group.all_reduce_async(part) for part in torch.split(total, BUCKET_BYTES // 4)]:
            work.wait()
        self._answer = HubAnswer(total, lease)
        digest = blake3(tensor_bytes(total)).update(encoded_lease).digest()
        return self._exchange_votes(self._make_vote(), digest)

    def _wait_for_hub(self) -> tuple[bytes, HubAnswer | None] | None:
        """Return the lease of the worker that talks to the hub; on that worker, also the whole answer."""
        answer: HubAnswer | None = None
        start = reported = time.monotonic()
        while True:
            lease = encode_lease(answer.lease) if answer is not None else b""
            can_request = self._client.can_request and self._failed_at != self.done
            own = _HubStatus(self.done, self._manager.newest_generation(), can_request, lease)
            messages = self._manager.group.all_gather_bytes(msgspec.msgpack.encode(own))
            statuses = [decode(_statuses, message, UNREADABLE) for message in messages]
            if max(status.newest_generation for status in statuses) > self._manager.generation:
                return None
            leader = _choose_leader(statuses, self.done)
            if statuses[leader].lease:
                return statuses[leader].lease, answer
            if leader == self._manager.rank:
                answer = self._request(is_last=sum(status.can_request for status in statuses) == 1)
            elif time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                name = self._manager.name_of(leader)
                log.warning("waiting for %.0f s for the hub, to which %s talks", reported - start, name)

    def _request(self, *, is_last: bool) -> HubAnswer | None:
        """Request an answer from the hub. On failure let the next machine do it, unless this is the last."""
        try:
            return self._client.request(self.done, self._mean_loss, _POLL_S)
        except (BarnraiseError, OSError) as error:
            if is_last:
                raise
            log.warning("this machine cannot talk to the hub; the next one does: %s", error)
            self._failed_at = self.done
            return None

    def _mean_loss(self) -> float | None:
        """Return the mean loss of the lease; of its last step, only this worker's own part is known."""
        losses = [entry["loss"] for entry in self._metrics.since(self._lease_start) if "loss" in entry]
        last = self._metrics.mean(self.done - 1, "loss")
        losses += [] if last is None else [last]
        return sum(losses) / len(losses) if losses else None

    # commits

    def _committed_step(self, batches: int) -> CommittedStep:
        if not self._client.is_due:
            return super()._committed_step(batches)
        assert self._answer is not None
        lease = torch.frombuffer(bytearray(encode_lease(self._answer.lease)), dtype=torch.uint8)
        return CommittedStep(self.done + 1, self._state.epoch, self.clip, [self._answer.state, lease], 0)

    def _apply_update(self, clip: float | None, batches: int) -> None:
        if not self._client.is_due:
            super()._apply_update(clip, batches)
            self._client.advance()
            self._trained_steps += 1
            return
        assert self._answer is not None
        answer, self._answer = self._answer, None
        self._advance_schedulers(self._client.apply(answer))
        self._lease_start = self._metrics.count + 1  # the last lease's last step is logged with this one
        self.done += 1

    def _step_optimizers(self) -> None:
        with scaled_rates(self._state.optimizers, self._client.rate_factor):
            super()._step_optimizers()

    def _replay(self, step: CommittedStep) -> None:
        if not self._client.is_due:
            super()._replay(step)
            return
        self._answer = answer_from_tensors(step.tensors, self._client.size)
        self._apply_update(step.clip, step.batches)


@contextlib.contextmanager
def scaled_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> Iterator[None]:
    """Multiply the learning rates of all parameter groups while the context is open."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]
    try:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _choose_leader(statuses: Sequence[_HubStatus], step: int) -> int:
    """Return the first rank that can talk to the hub."""
    if {status.step for status in statuses} != {step}:
        raise RunError("workers of one group are at different steps", hint="Report this.")
    for rank, status in enumerate(statuses):
        if status.can_request:
            return rank
    raise RunError(
        "none of the remaining machines can talk to the hub",
        hint=f"On at least one of them, then join again with --site: {install_hint('hub')}",
    )
