"""Hub client of a group: the state that all its workers hold of the lease, and the conversation with the hub.

The version that a lease starts from, the lease, and its progress are part of the training state, so any
worker can continue them. One worker at a time talks to the hub, in a background thread, so that it still
notices changes of the group. If a network split makes two workers talk, no harm is done: to the hub they
are one member with one lease, which counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, RunError
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.hub.flat_parameters import FlatParameters
from barnraise.training.hub.leased_data import LeasedData
from barnraise.training.hub.parameter_server import LeasedWork, ParameterServer, RoundUpdate
from barnraise.training.state.training_state import TrainingState
from barnraise.training.steps.background_task import BackgroundTask

UNREADABLE = "a worker's message about the hub's lease cannot be read"


class HubAnswer(NamedTuple):
    """The hub's response to an update: the next version, and the next lease."""

    state: torch.Tensor
    lease: LeasedWork


class GroupHubClient:
    """Lease and version of a group; ``server`` is None on a machine that cannot talk to a hub."""

    def __init__(
        self,
        server: ParameterServer | None,
        reducer: GradientReducer,
        data: LeasedData,
        state: TrainingState,
    ) -> None:
        self._server, self._data, self._state = server, data, state
        self._flat = FlatParameters(state.model, reducer)
        self._spec = self._flat.spec(data.data_order)
        self._base = torch.zeros(self._flat.size)  # the version that the lease starts from
        self._lease_start: float | None = None  # when this process received the lease
        self._last_lease: LeasedWork | None = None  # the last one that the hub gave to this process
        self._request: BackgroundTask[HubAnswer] | None = None
        self._requested: tuple[int, LeasedWork | None] = (-1, None)  # its step, and the lease it completes

    # the state

    def state_dict(self) -> dict[str, Any]:
        return {"base": self._base, "task": encode_lease(self._data.lease), "place": self._data.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._base.copy_(state["base"])
        lease = decode_lease(state["task"])
        if lease != self._data.lease:
            self._lease_start = None
        self._data.lease, self._data.offset = lease, int(state["place"])

    @property
    def size(self) -> int:
        return self._flat.size

    @property
    def is_due(self) -> bool:
        """Return True if the hub must be asked before anything can be trained."""
        return self._data.is_trained

    @property
    def has_lease(self) -> bool:
        return self._data.lease is not None

    @property
    def rate_factor(self) -> float:
        """Return the factor of the script's learning rates, for steps of the current lease."""
        return self._data.lease.rate_factor if self._data.lease is not None else 1.0

    def advance(self) -> None:
        """Count a committed step of the lease."""
        self._data.advance()

    def apply(self, answer: HubAnswer) -> int:
        """Load the next version and lease. Return how many batches all groups have trained since."""
        batch = self._data.data_order.batch
        previous = self._data.lease
        self._drop_request()
        self._base.copy_(answer.state)
        self._flat.write(self._base)
        self._data.lease, self._data.offset = answer.lease, 0
        self._lease_start = time.monotonic()
        if previous is None:
            self._state.epoch = self._data.epoch or 0
        covered = 0 if previous is None else previous.covered // batch
        return max(0, answer.lease.covered // batch - covered)

    # requests

    @property
    def can_request(self) -> bool:
        return self._server is not None

    def request(self, done: int, loss: Callable[[], float | None], timeout_s: float) -> HubAnswer | None:
        """Ask the hub for what follows this step, once. Return None if it has not answered in time."""
        requested = (done, self._data.lease)
        if self._requested != requested:
            self._drop_request()  # other workers have settled its subject meanwhile
        if self._request is None:
            self._request = BackgroundTask(self._make_request(loss()), "barnraise-hub")
            self._requested = requested
        self._request.wait(timeout_s)
        is_answered = self._requested == requested and self._request.has_ended
        return self._request.result() if is_answered else None

    def _drop_request(self) -> None:
        """Drop a request with its copies of the model; one that still runs is waited for instead."""
        if self._request is not None and self._request.has_ended:
            self._request = None

    def _make_request(self, loss: float | None) -> Callable[[], HubAnswer]:
        """Return a function that talks to the hub. It uses copies of the parameters, made now."""
        server, lease, spec = self._server, self._data.lease, self._spec
        assert server is not None
        if lease is None:
            state, update = self._flat.read(), None
        else:
            state = self._base.clone()
            duration_s = time.monotonic() - self._lease_start if self._lease_start is not None else 0.0
            speed = self._data.leased_samples / duration_s if duration_s > 0 else 0.0
            change = self._flat.change(self._base)
            if not change.isfinite().all():
                raise RunError(
                    "the change since the hub's last version is not finite",
                    hint="Lower the learning rate, or clip the gradient with run.clip_grad_norm.",
                )
            update = RoundUpdate(change, self._data.leased_samples, loss, speed)

        def talk() -> HubAnswer:
            if update is None or lease is None:
                new_lease = server.begin(spec, state)
            else:
                if lease != self._last_lease:
                    server.continue_lease(spec, lease)
                new_lease = server.exchange(update, state)
            self._data.check(new_lease)
            self._last_lease = new_lease
            return HubAnswer(state, new_lease)

        return talk


def encode_lease(lease: LeasedWork | None) -> bytes:
    """Encode a lease for other workers or for a checkpoint."""
    return msgspec.msgpack.encode(lease)


def decode_lease(data: bytes) -> LeasedWork | None:
    """Decode a lease from bytes. Raise ProtocolError if it cannot be read."""
    return decode(_leases, data, UNREADABLE)


def answer_from_tensors(tensors: list[torch.Tensor], size: int) -> HubAnswer:
    """Build an answer from another worker's bytes. Raise ProtocolError if it does not fit this model."""
    if len(tensors) != 2 or tensors[0].numel() != 4 * size:
        raise ProtocolError("a version of the hub does not fit this model")
    lease = decode_lease(bytes(tensors[1].numpy()))
    if lease is None:
        raise ProtocolError(UNREADABLE)
    return HubAnswer(tensors[0].view(torch.float32), lease)


_leases: msgspec.msgpack.Decoder[LeasedWork | None] = msgspec.msgpack.Decoder(LeasedWork | None)
