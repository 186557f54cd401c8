"""Exchange of shard files between machines, over the program's own torch process group.

Ranks that see the same folder are one machine, and the lowest of them acts for it (the leader).
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist
from msgspec import Meta

from barnraise.agent_client.roles import ask_roles
from barnraise.checkpoint.shard_files import DRAFT, ShardFile, Start, TransferPlan, is_valid
from barnraise.core.config import load_settings
from barnraise.core.decoding import decode
from barnraise.core.errors import BarnraiseError, CheckpointError, ProtocolError
from barnraise.core.files import remove_tree, sync_path
from barnraise.core.units import format_size

log = logging.getLogger("barnraise.checkpoint")

RETRY_HINT = "Earlier checkpoints are unchanged: fix the reported problem, then try again."
_MARKER, _PART = ".here-", ".part-"
_CHUNK = 8 << 20
_MAX_MESSAGE = 64 << 20
_MAX_ERROR = 2000
_REPORT_S = 10.0

T = TypeVar("T")


class _RankRequest(msgspec.Struct, frozen=True, array_like=True):
    """The call of a rank; ``token`` names a marker file that shows which ranks share a folder."""

    action: str
    step: int
    copies: int
    token: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    start: Start


class MachineRing:
    """The machines of a process group, in order, each represented by its leader rank."""

    def __init__(
        self,
        root: Path,
        first: _RankRequest,
        rank: int,
        leader_of: Sequence[int],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Set the ring up. ``group``: all ranks again; None: the program's own group."""
        self.root = root
        self.token, self.start = first.token, first.start
        self.rank = rank
        self.leaders = sorted(set(leader_of))
        self.is_leader = leader_of[rank] == rank
        self.group = group
        self._first, self._leader_of = first, leader_of

    @classmethod
    def connect(cls, root: Path, action: str, step: int, copies: int) -> MachineRing:
        """Find which ranks share a machine, and check that all ranks make the same call.

        Raise CheckpointError if a guest's machine takes part.
        """
        start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        own = _RankRequest(action, step, copies, secrets.token_hex(8), start)
        try:
            requests = run_on_all_ranks(lambda: _announce(root, own), _requests)
            visible = [
                rank for rank, request in enumerate(requests) if (root / f"{_MARKER}{request.token}").exists()
            ]
            leader_of = run_on_all_ranks(lambda: visible[0], _ranks)
        finally:
            with suppress(OSError):
                (root / f"{_MARKER}{own.token}").unlink()
        first = requests[0]
        for rank, request in enumerate(requests):
            if (request.action, request.step, request.copies) != (first.action, first.step, first.copies):
                raise CheckpointError(
                    f"rank 0 calls {first.action} with step {first.step} and copies {first.copies}, "
                    f"rank {rank} {request.action} with {request.step} and {request.copies}",
                    hint="Call it on all ranks with the same arguments.",
                )
        if not {rank for rank, leader in enumerate(leader_of) if rank == leader} >= set(leader_of):
            raise CheckpointError("ranks disagree on which of them share a folder", hint="Use a local disk.")
        ring = cls(root, first, dist.get_rank() if dist.is_initialized() else 0, leader_of)
        if ring.is_leader:
            for leftover in root.glob(f"{DRAFT}*"):  # of a killed process; ranks may have started this draft
                if leftover.name != f"{DRAFT}{ring.token}":
                    remove_tree(leftover)
        return ring

    def over(self, group: dist.ProcessGroup | None) -> MachineRing:
        """Return the same ring, whose messages go over another group."""
        return MachineRing(self.root, self._first, self.rank, self._leader_of, group)

    def machine_of(self, rank: int) -> int:
        """Return the index of a rank's machine in the ring."""
        return self.leaders.index(self._leader_of[rank])

    def gather_from_machines(
        self, work: Callable[[], Sequence[T]], decoder: msgspec.msgpack.Decoder[tuple[T, ...]]
    ) -> list[tuple[T, ...]]:
        """Run a function once on each machine. Return the results by machine."""
        results = run_on_all_ranks(lambda: tuple(work()) if self.is_leader else (), decoder, self.group)
        return [results[leader] for leader in self.leaders]

    def run_on_each_machine(self, work: Callable[[], None]) -> None:
        """Run a function once on each machine. Raise CheckpointError on all ranks if it fails on any."""

        def run() -> bool:
            if self.is_leader:
                work()
            return True

        run_on_all_ranks(run, _bools, self.group)

    def transfer(self, folder: Path, plan: TransferPlan) -> None:
        """Send files between machines, into the same folder on each."""
        if not plan:
            return
        transfer = _FileTransfer(folder, self.group)
        if self.is_leader:
            count, own = len(self.leaders), self.machine_of(self.rank)
            for shift in range(1, count):
                to, source = (own + shift) % count, (own - shift) % count
                outgoing, incoming = plan.get((own, to), ()), plan.get((source, own), ())
                transfer.exchange(outgoing, self.leaders[to], incoming, self.leaders[source])
        self.run_on_each_machine(transfer.raise_if_failed)


def _announce(root: Path, request: _RankRequest) -> _RankRequest:
    _reject_guests()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    (root / f"{_MARKER}{request.token}").touch()
    return request


def _reject_guests() -> None:
    """Raise CheckpointError if a guest's machine takes part, because DCP unpickles its messages."""
    if not os.environ.get("BARNRAISE_LAUNCHED"):
        return
    known = ask_roles(load_settings(), os.environ["BARNRAISE_RUN"], launched=True)
    if known is not None and (guests := known.run_guests):
        raise CheckpointError(
            f"{', '.join(guests)} takes part as a guest, and DCP would unpickle what its workers send",
            hint="Name only owners' machines with `--on`, or train with `barnraise.init()`.",
        )


# file transfer


class _FileChunk(NamedTuple):
    file: ShardFile
    offset: int
    size: int


def _chunks(files: Sequence[ShardFile]) -> Iterator[_FileChunk]:
    for file in files:
        for offset in range(0, max(1, file.size), _CHUNK):
            yield _FileChunk(file, offset, min(_CHUNK, file.size - offset))


class _FileTransfer:
    """Sends and receives files. Disk errors are reported at the end, because the other machines wait."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        self._folder, self._group = folder, group
        self._device = _device(group)
        self._failure = ""
        self._received, self._report_at = 0, time.monotonic() + _REPORT_S

    def exchange(
        self, outgoing: Sequence[ShardFile], to: int, incoming: Sequence[ShardFile], source: int
    ) -> None:
        """Send to one rank while receiving from another. All machines do this in the same order."""
        arrived: tuple[_FileChunk, torch.Tensor] | None = None
        for out, into in zip_longest(_chunks(outgoing), _chunks(incoming)):
            data = torch.empty(into.size if into else 0, dtype=torch.uint8, device=self._device)
            operations = [dist.P2POp(dist.irecv, data, source, self._group)] if data.numel() else []
            if out and out.size:
                sent = self._read(out).to(self._device)
                operations.append(dist.P2POp(dist.isend, sent, to, self._group))
            works = dist.batch_isend_irecv(operations) if operations else []
            if arrived:  # written while the next one is in flight
                self._write(*arrived)
            for work in works:
                work.wait()
            arrived = (into, data) if into else None
        if arrived:
            self._write(*arrived)

    def raise_if_failed(self) -> None:
        """Raise CheckpointError with the first disk error."""
        if self._failure:
            raise CheckpointError(self._failure, hint=RETRY_HINT)

    def _read(self, chunk: _FileChunk) -> torch.Tensor:
        data = torch.zeros(chunk.size, dtype=torch.uint8)
        try:
            with open(self._folder / chunk.file.name, "rb") as file:
                file.seek(chunk.offset)
                file.readinto(data.numpy().data)
        except OSError as error:
            self._fail(str(error))
        return data

    def _write(self, chunk: _FileChunk, data: torch.Tensor) -> None:
        file, part = chunk.file, self._folder / f"{_PART}{chunk.file.name}"
        try:
            with open(part, "ab" if chunk.offset else "wb") as opened:
                opened.write(data.cpu().numpy().data)
            if chunk.offset + chunk.size == file.size:
                sync_path(part)
                if is_valid(part, file):
                    part.replace(self._folder / file.name)
                else:
                    self._fail(f"the received {file.name} does not match its manifest")
        except OSError as error:
            self._fail(str(error))
        self._received += chunk.size
        if time.monotonic() > self._report_at:
            self._report_at = time.monotonic() + _REPORT_S
            log.warning("received %s of the files of %s", format_size(self._received), self._folder.name)

    def _fail(self, message: str) -> None:
        self._failure = self._failure or message


# messages between ranks


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    value: bytes
    failure: Annotated[str, Meta(max_length=_MAX_ERROR)] = ""
    hint: Annotated[str, Meta(max_length=_MAX_ERROR)] = ""


def run_on_all_ranks(
    work: Callable[[], T], decoder: msgspec.msgpack.Decoder[T], group: dist.ProcessGroup | None = None
) -> list[T]:
    """Return the results of a function by rank, or raise CheckpointError on all ranks."""
    try:
        own = _Outcome(msgspec.msgpack.encode(work()))
    except (OSError, BarnraiseError) as error:
        hint = error.hint if isinstance(error, BarnraiseError) else RETRY_HINT
        own = _Outcome(b"", error_text(error), hint[:_MAX_ERROR])
    problem = "a message of another rank cannot be read"
    gathered = _all_gather_bytes(msgspec.msgpack.encode(own), group)
    outcomes = [decode(_outcomes, data, problem) for data in gathered]
    failed: dict[str, list[str]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.failure:
            failed.setdefault(outcome.failure, []).append(str(rank))
    if failed:
        reasons = "; ".join(f"rank {', '.join(ranks)}: {failure}" for failure, ranks in failed.items())
        raise CheckpointError(reasons, hint=next(outcome.hint for outcome in outcomes if outcome.failure))
    return [decode(decoder, outcome.value, problem) for outcome in outcomes]


def _all_gather_bytes(message: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    if not dist.is_initialized():
        return [message]
    device = _device(group)
    size = torch.tensor([len(message)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size, group)
    lengths = [int(length) for length in sizes]
    if not 0 < min(lengths) <= max(lengths) <= _MAX_MESSAGE:
        raise ProtocolError(f"a rank sent a message of {max(lengths)} bytes; the limit is {_MAX_MESSAGE}")
    padded = torch.frombuffer(bytearray(message.ljust(max(lengths), b"\0")), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group)
    return [row[:length].cpu().numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]


def _device(group: dist.ProcessGroup | None) -> str:
    """Return the device of the group's tensors: main memory if the group supports it."""
    if not dist.is_initialized():
        return "cpu"
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return "cpu" if "cpu" in kinds else kinds[0]


def error_text(error: BaseException) -> str:
    """Return the message of an error, shortened for transfer."""
    return (error.message if isinstance(error, BarnraiseError) else str(error))[:_MAX_ERROR]


_outcomes = msgspec.msgpack.Decoder(_Outcome)
_requests = msgspec.msgpack.Decoder(_RankRequest)
_bools = msgspec.msgpack.Decoder(bool)
_ranks: msgspec.msgpack.Decoder[int] = msgspec.msgpack.Decoder(Annotated[int, Meta(ge=0)])
