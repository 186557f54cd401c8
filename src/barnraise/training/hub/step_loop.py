"""The steps of a training at a hub: those of a lease are like all others, and between two leases is one more.

That one is the exchange. The first member that can speaks to the hub; what comes back is summed like
gradients, only that the others add nothing, and counts when all are known to hold it. So a version reaches
all members or none, and if the one who speaks dies, the next one asks again: the hub counts a lease once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from blake3 import blake3

from barnraise.checkpoint.serialization import as_bytes
from barnraise.core.decoding import decode
from barnraise.core.errors import BarnraiseError, CollectiveError, ProtocolError, RunError
from barnraise.core.installation import install_hint
from barnraise.training.gradients.reducer import BUCKET_BYTES
from barnraise.training.hub.group_client import (
    UNREADABLE,
    GroupHubClient,
    HubAnswer,
    answer_of,
    decode_task,
    encode_task,
)
from barnraise.training.recovery.live_recovery import CommittedStep
from barnraise.training.steps.commit_vote import CommitVote
from barnraise.training.steps.step_loop import StepLoop

log = logging.getLogger("barnraise.training")

_LOOK_S = 0.5  # how often those who wait for the hub hear of each other
_SAY_S = 60.0


class _Tick(msgspec.Struct, frozen=True, array_like=True):
    """Of one member that waits for the hub."""

    step: int
    newest: int  # the newest generation that it knows of
    speaks: bool  # it could ask the hub
    task: bytes = b""  # that the hub gave it; empty: it did not answer yet


_ticks = msgspec.msgpack.Decoder(_Tick)


class HubStepLoop(StepLoop):
    """With ``outward``, which all members hold alike."""

    def __init__(self, outward: GroupHubClient, *parts: Any) -> None:
        super().__init__(*parts)
        self._outward = outward
        self._answer: HubAnswer | None = None  # what an exchange brought, until it is committed
        self._lease_began = 0  # in the journal
        self._mute_at = -1  # the step at which this member could not speak to the hub

    def begin(self) -> None:
        """In a group that has met: until there is something to train, or nothing is left."""
        while not self._outward.has_begun:
            self.finish()

    def finish(self) -> None:
        if not self._outward.is_due:
            super().finish()
            return
        try:
            words = self._exchange()
        except CollectiveError as error:
            log.info("what the hub said did not reach everybody: %s", error.message)
            self.meet(error)
            return
        if words is None:
            self.meet()
        else:
            self._commit(words)

    def _exchange(self) -> list[CommitVote] | None:
        """None: somebody comes or goes first."""
        heard = self._await_hub()
        if heard is None:
            return None
        task, answer = heard
        found = decode_task(task)
        if found is None:
            raise ProtocolError(UNREADABLE)
        total = torch.zeros(self._outward.size) if answer is None else answer.state.clone()
        for one in [self._circle.begin_sum(part) for part in torch.split(total, BUCKET_BYTES // 4)]:
            one.wait()
        self._answer = HubAnswer(total, found)
        return self._tell_held(self._word(), blake3(as_bytes(total)).update(task).digest())

    def _await_hub(self) -> tuple[bytes, HubAnswer | None] | None:
        """The task that it gave to whoever speaks; if that is this member, also its whole answer."""
        answer: HubAnswer | None = None
        began = said_at = time.monotonic()
        while True:
            task = encode_task(answer.task) if answer is not None else b""
            speaks = self._outward.speaks and self._mute_at != self.done
            mine = _Tick(self.done, self._circle.newest(), speaks, task)
            words = self._circle.gather(msgspec.msgpack.encode(mine))
            said = [decode(_ticks, word, UNREADABLE) for word in words]
            if max(one.newest for one in said) > self._circle.generation:
                return None
            leader = _leader(said, self.done)
            if said[leader].task:
                return said[leader].task, answer
            if leader == self._circle.rank:
                answer = self._spoken(is_last=sum(one.speaks for one in said) == 1)
            elif time.monotonic() - said_at > _SAY_S:
                said_at = time.monotonic()
                log.warning(
                    "waiting for %.0f s for the hub, to which member %d speaks", said_at - began, leader
                )

    def _spoken(self, *, is_last: bool) -> HubAnswer | None:
        """What keeps one machine from speaking (a full disk, its own line) need not keep the next."""
        try:
            return self._outward.speak(self.done, self._loss, _LOOK_S)
        except (BarnraiseError, OSError) as error:
            if is_last:
                raise
            log.warning("this machine cannot speak to the hub, the next one does: %s", error)
            self._mute_at = self.done
            return None

    def _loss(self) -> float | None:
        """A mean over the steps of the lease: of the last one, this member knows its own part."""
        known = [one["loss"] for one in self._journal.since(self._lease_began) if "loss" in one]
        last = self._journal.mean(self.done - 1, "loss")
        known += [] if last is None else [last]
        return sum(known) / len(known) if known else None

    # commits

    def _result(self, batches: int) -> CommittedStep:
        if not self._outward.is_due:
            return super()._result(batches)
        assert self._answer is not None
        task = torch.frombuffer(bytearray(encode_task(self._answer.task)), dtype=torch.uint8)
        return CommittedStep(self.done + 1, self._state.epoch, self.clip, [self._answer.state, task], 0)

    def _take_effect(self, clip: float | None, batches: int) -> None:
        if not self._outward.is_due:
            super()._take_effect(clip, batches)
            self._outward.go_forward()
            return
        assert self._answer is not None
        answer, self._answer = self._answer, None
        self._go_forward(self._outward.take(answer))
        self._lease_began = self._journal.count + 1  # the last lease's last step is told with this
        self.done += 1

    def _follow(self, result: CommittedStep) -> None:
        if not self._outward.is_due:
            super()._follow(result)
            return
        self._answer = answer_of(result.tensors, self._outward.size)
        self._take_effect(result.clip, result.batches)


def _leader(said: Sequence[_Tick], step: int) -> int:
    """Who speaks for all: the first who can."""
    if {one.step for one in said} != {step}:
        raise RunError("members of one group are at different steps", hint="Report this.")
    for rank, one in enumerate(said):
        if one.speaks:
            return rank
    raise RunError(
        "none of the machines that are left can speak to the hub",
        hint=f"On at least one of them: {install_hint('hub')}; then join again with --site.",
    )
