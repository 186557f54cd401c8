"""Workers that really train a small model with a hub, by the client that members use; some of them hostile.

The model tells ten classes of noisy points apart. Its loss has a floor: runs that both came far differ
little. What hostile workers do: see ``KINDS``.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from barnraise.core.errors import BarnraiseError, HubRefused
from barnraise.hub.client.client import HubClient
from barnraise.hub.client.contributor import Contributor
from barnraise.hub.client.upload import push
from barnraise.hub.protocol.invites import Invite
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    JoinResponse,
    Lease,
    SampleSpan,
    UpdateDeclaration,
    VectorEntry,
    VectorLayout,
)
from barnraise.hub.protocol.vector_file import MAGIC, VectorForm, encode_vector
from barnraise.identity.keys import NodeKey

KINDS = ("nan", "sign-flip", "x100", "copied", "stale", "random", "oversize", "malformed")
_START_S = 120.0
SPEED = 64.0  # samples per second that a worker claims, so that leases are equal on any machine
_INPUTS, _HIDDEN, _CLASSES, _BATCH, _RATE = 32, 128, 10, 16, 0.3
_TRAIN, _HELD_OUT = 65_536, 4096


def flatten(layout: VectorLayout, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the parameters as one float32 vector on the CPU."""
    parts = [parameters[entry.name].detach().to("cpu", torch.float32) for entry in layout.entries]
    return torch.cat([part.reshape(-1) for part in parts])


def spread(layout: VectorLayout, flat: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
    """Copy a flat vector back into the parameters, in place."""
    sizes = [entry.numel for entry in layout.entries]
    with torch.no_grad():
        for entry, piece in zip(layout.entries, torch.split(flat, sizes), strict=True):
            parameters[entry.name].copy_(piece.reshape(entry.shape))


class Task:
    """Data, model and sample order, which are the same for all members."""

    def __init__(self, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = _TRAIN + _HELD_OUT
        self.points = torch.randn(count, _INPUTS, generator=generator)
        scores = self.points @ torch.randn(_INPUTS, _CLASSES, generator=generator)
        noise = torch.randn(count, _CLASSES, generator=generator).mul_(4.0)
        self.labels = (scores + noise).argmax(dim=1)
        self.seed = seed
        model = self.model()
        entries = [
            VectorEntry(name, tuple(parameter.shape), "float32")
            for name, parameter in model.named_parameters()
        ]
        self.layout = VectorLayout(tuple(entries))
        self.course = HubDataOrder(samples=_TRAIN, batch=_BATCH, seed=seed, epochs=1 << 10)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(_INPUTS, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _CLASSES))

    def flat(self, model: nn.Module) -> torch.Tensor:
        return flatten(self.layout, dict(model.named_parameters()))

    def train(self, model: nn.Module, spans: Sequence[SampleSpan]) -> float:
        """Train one pass over the samples of a lease and return the mean loss."""
        losses = []
        for span in spans:
            order = torch.randperm(
                _TRAIN, generator=torch.Generator().manual_seed(self.seed + int(span.epoch))
            )
            for first in range(span.first, span.last, _BATCH):
                batch = order[first : min(first + _BATCH, span.last)]
                loss = nn.functional.cross_entropy(model(self.points[batch]), self.labels[batch])
                model.zero_grad()
                torch.autograd.backward(loss)
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(parameter.grad, alpha=_RATE)
                losses.append(float(loss.detach()))
        return sum(losses) / len(losses)

    def held_out_loss(self, state: torch.Tensor) -> float:
        model = self.model()
        spread(self.layout, state, dict(model.named_parameters()))
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(self.points[_TRAIN:]), self.labels[_TRAIN:]))


class Rogue(Contributor):
    """Hands over something else than what it trained. ``seen`` holds an honest member's last change."""

    kinds: tuple[str, ...] = ()
    seen: list[torch.Tensor]
    turn = 0

    def _push(self, lease: Lease, change: torch.Tensor, samples: int, loss: float | None) -> bool:
        kind = self.kinds[self.turn % len(self.kinds)]
        self.turn += 1
        if kind == "sign-flip":
            return super()._push(lease, -change, samples, loss)
        if kind == "x100":
            return super()._push(lease, change * 100, samples, loss)
        if kind == "random":
            noise = torch.randn_like(change)
            return super()._push(lease, noise * (change.norm() / noise.norm()), samples, loss)
        return self._push_bytes(kind, lease, change, samples)

    def _push_bytes(self, kind: str, lease: Lease, change: torch.Tensor, samples: int) -> bool:
        assert self._description is not None
        terms = self._description.terms
        version = max(0, lease.version - 5) if kind == "stale" else lease.version
        form = VectorForm(change.numel(), terms.chunk, terms.codec, version)
        with tempfile.TemporaryDirectory(dir=self._folder) as room:
            path = Path(room) / "update"
            with path.open("wb") as file:
                encode_vector(file, self.seen[-1] if kind == "copied" and self.seen else change, form)
            data = bytearray(path.read_bytes())
            start = len(MAGIC) + 4
            if kind == "nan":
                data[start : start + 4] = b"\x00\x00\xc0\x7f"  # a scale
            if kind == "oversize":
                data += bytes(9 * len(data))
            if kind == "malformed":
                data[:start] = b"\xff" * start
            path.write_bytes(data)
            sha256 = hashlib.sha256(data).hexdigest()
            declaration = UpdateDeclaration(
                sha256=sha256, size=len(data), lease=lease.id, version=version, samples=samples
            )
            try:
                push(self._client, declaration, path)
            except HubRefused as error:
                if error.status == 403:
                    raise
                return False
        return True


class Worker(threading.Thread):
    """One member that trains until the chain has ``samples`` samples, or until it is stopped.

    ``start``: barrier at which all wait until each holds a lease; otherwise the first would close rounds
    alone.
    """

    def __init__(
        self,
        invite: Invite,
        name: str,
        task: Task,
        folder: Path,
        *,
        samples: int,
        start: threading.Barrier | None = None,
        owner_key: NodeKey | None = None,
        kinds: tuple[str, ...] = (),
        seen: list[torch.Tensor] | None = None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.task, self.samples, self.kinds, self._start = task, samples, kinds, start
        self.seen = seen if seen is not None else []
        self.stopping = threading.Event()
        self.ended_by = ""
        self.state = task.flat(task.model())
        self._invite, self._folder = invite, folder
        self._key = owner_key or NodeKey.generate()
        self.client = HubClient(invite.addresses, invite.hub_id, self._key, say=lambda words: None)
        kind = Rogue if kinds else Contributor
        self.contributor = kind(self.client, folder, is_owner=owner_key is not None, metered=lambda: False)
        if isinstance(self.contributor, Rogue):
            self.contributor.kinds, self.contributor.seen = kinds, self.seen

    def run(self) -> None:
        try:
            self._work()
        except BarnraiseError as error:
            self.ended_by = error.message
        except threading.BrokenBarrierError:
            self.ended_by = "not all workers began"
        finally:
            self.client.close()

    def _work(self) -> None:
        request = self._invite.request(self._key.id, self.name)
        self.client.ask_with_retries("POST", "/v1/members", JoinResponse, request)
        lease = self.contributor.start(self.task.layout, self.task.course, self.state)
        if self._start is not None:
            self._start.wait(_START_S)
        model = self.task.model()
        parameters = dict(model.named_parameters())
        while lease is not None and lease.covered < self.samples and not self.stopping.is_set():
            spread(self.task.layout, self.state, parameters)
            loss = self.task.train(model, lease.spans)
            change = self.state - self.task.flat(model)
            lease = self.contributor.exchange(
                change,
                self.state,
                samples=lease.samples,
                loss=loss if math.isfinite(loss) else None,
                speed=SPEED,
            )
            if not self.kinds:
                self.seen[:] = [change]  # a copying member can only know updates that have arrived
        self.contributor.leave()


def await_all(workers: Sequence[Worker], longest_s: float) -> None:
    """Wait until every honest worker is done, then stop the hostile ones."""
    deadline = time.monotonic() + longest_s
    for worker in workers:
        if not worker.kinds:
            worker.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.stopping.set()
