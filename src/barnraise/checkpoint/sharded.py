"""Sharded checkpoints of machines that share no disk: DCP plans, writes and reshards, this moves its files.

Ranks that see one folder are one machine, and the lowest of them acts for it. The machines form a ring: each
keeps the files of its own ranks, and copies of those of the machines before it. Whatever is decided, every
rank decides from the same words; what fails on one rank is an error on all.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist
from msgspec import Meta
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import StatusRequest, StatusResponse, decode_told, encode
from barnraise.agent_client.run_requests import WatchRequest, WatchResponse
from barnraise.checkpoint.shard_files import (
    DRAFT,
    METADATA,
    SHARDED,
    FoundShards,
    HeldShards,
    Plan,
    ShardFile,
    ShardManifest,
    Start,
    adopt,
    all_files,
    earlier_homes,
    encode_manifest,
    inventory,
    is_whole,
    keep,
    list_files,
    make_room,
    missing_files,
    neighbours_copies,
    newest_first,
    out_of_date,
    whole_files,
)
from barnraise.core.config import load_settings, state_directory
from barnraise.core.decoding import decode
from barnraise.core.errors import AgentError, BarnraiseError, ProtocolError, RunError
from barnraise.core.files import remove_tree, sync_path
from barnraise.core.units import format_size
from barnraise.runs.checkpoint_manifest import MOST_STEP
from barnraise.runs.record import MOST_MACHINES

log = logging.getLogger("barnraise.checkpoint")

_HERE, _PART = ".here-", ".part-"
_CHUNK = 8 << 20
_LARGEST_WORD = 64 << 20
_LONGEST_FAILURE = 2000
_ANSWER_S = 30.0
_SAY_S = 10.0
_TRY_AGAIN = "Earlier checkpoints are untouched: mend what is said here, then try again."

T = TypeVar("T")


def save_sharded(state: dict[str, Any], folder: str | Path, step: int, *, copies: int = 2) -> None:
    """Called by all ranks. ``state`` is what `torch.distributed.checkpoint.save` takes.

    When it returns, any ``copies - 1`` machines may be lost. RunError, on every rank, if it was not saved.
    """
    if not 0 <= step <= MOST_STEP or not 1 <= copies <= MOST_MACHINES:
        raise RunError(f"step {step} cannot be saved in {copies} copies", hint="Save 1 copy or more.")
    ring = _Ring.meet(_home(folder), "save", step, copies)
    draft = ring.root / f"{DRAFT}{ring.token}"
    try:
        with _named_failures(f"step {step} was not saved"):
            # What all ranks have alike goes into the file of one: each machine will have to fetch that.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            save(state, storage_writer=_Writer(draft), planner=planner, no_dist=not dist.is_initialized())
        listed = ring.ask_machines(lambda: list_files(draft), _lists)
        manifest = encode_manifest(ShardManifest(step=step, start=ring.start, files=all_files(listed)))
        ring.move(draft, neighbours_copies(listed, copies))
        ring.each_machine(lambda: keep(draft, step, manifest))
        held = ring.ask_machines(lambda: inventory(ring.root), _inventories)
    except BarnraiseError:
        if ring.leads:
            remove_tree(draft)
        raise
    if ring.leads:
        for name in out_of_date(held, ring.place_of(ring.rank), manifest):
            remove_tree(ring.root / name)
    if ring.rank == 0 and copies > len(ring.leaders):
        log.info("step %d has %d copies, not %d: one a machine", step, len(ring.leaders), copies)


def load_sharded(state: dict[str, Any], folder: str | Path) -> int | None:
    """Called by all ranks. Fills ``state`` as `torch.distributed.checkpoint.load` does; returns the step.

    The newest checkpoint counts of which every file is whole on some machine that is here; None: there is
    none. RunError, on every rank, if it does not fit ``state``.
    """
    ring = _Ring.meet(_home(folder), "load", 0, 0)
    earlier = earlier_homes(os.environ, folder)
    if earlier:
        ring.each_machine(lambda: adopt(ring.root, earlier))
    for known in newest_first(ring.ask_machines(lambda: inventory(ring.root), _inventories)):
        found = known if known.missing else _verified(ring, known)
        if not found.missing:
            _restore(ring, found, state)
            if ring.rank == 0:
                log.warning("going on from the sharded checkpoint of step %d", found.manifest.step)
            return found.manifest.step
        if ring.rank == 0:
            log.warning("%s is not used: %s is whole on no machine here", found.name, found.missing[0])
    return None


def _verified(ring: _Ring, known: FoundShards) -> FoundShards:
    """Only files with the right hash count."""
    place = ring.root / known.name
    return known.held_by(ring.ask_machines(lambda: whole_files(place, known), _numbers))


def _restore(ring: _Ring, found: FoundShards, state: dict[str, Any]) -> None:
    """Each machine gets the files that its ranks read, and no others."""
    place = ring.root / found.name
    ring.each_machine(lambda: make_room(place, found))
    ring.move(place, missing_files(found, [{METADATA} for _ in ring.leaders]))

    def fetch(names: Collection[str]) -> None:
        wanted: list[set[str]] = [set() for _ in ring.leaders]
        for rank, said in enumerate(_together(lambda: tuple(names), _names)):
            wanted[ring.place_of(rank)] |= set(said)
        ring.move(place, missing_files(found, wanted))

    with _named_failures(f"step {found.manifest.step} cannot be loaded"):
        load(state, storage_reader=_Reader(place, fetch), no_dist=not dist.is_initialized())


def _home(folder: str | Path) -> Path:
    """In a run the run's own folder, which outlives a restart; an absolute path is taken as it is."""
    kept = os.environ.get("BARNRAISE_CHECKPOINTS", "")
    return Path(kept, SHARDED, folder) if kept else Path(folder)


# who takes part


class _Errand(msgspec.Struct, frozen=True, array_like=True):
    """What a rank came for; ``token`` names a file by which others see whether they share its folder."""

    doing: str
    step: int
    copies: int
    token: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    start: Start


class _Ring:
    """The machines in order, each by the rank that acts for it."""

    def __init__(self, root: Path, first: _Errand, rank: int, leader_of: Sequence[int]) -> None:
        self.root = root
        self.token, self.start = first.token, first.start
        self.rank = rank
        self.leaders = sorted(set(leader_of))
        self.leads = leader_of[rank] == rank
        self._leader_of = leader_of

    @classmethod
    def meet(cls, root: Path, doing: str, step: int, copies: int) -> _Ring:
        """With all ranks, of which none may be a guest's."""
        start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        own = _Errand(doing, step, copies, secrets.token_hex(8), start)
        try:
            said = _together(lambda: _come(root, own), _errands)
            seen = [rank for rank, one in enumerate(said) if (root / f"{_HERE}{one.token}").exists()]
            leader_of = _together(lambda: seen[0], _ranks)
        finally:
            with suppress(OSError):
                (root / f"{_HERE}{own.token}").unlink()
        first = said[0]
        for rank, one in enumerate(said):
            if (one.doing, one.step, one.copies) != (first.doing, first.step, first.copies):
                raise RunError(
                    f"rank 0 says {first.doing} with step {first.step} and copies {first.copies}, "
                    f"rank {rank} {one.doing} with {one.step} and {one.copies}",
                    hint="Call it on all ranks with the same arguments.",
                )
        if not {rank for rank, leader in enumerate(leader_of) if rank == leader} >= set(leader_of):
            raise RunError("ranks disagree on who of them shares a folder", hint="Use a local disk.")
        ring = cls(root, first, dist.get_rank() if dist.is_initialized() else 0, leader_of)
        if ring.leads:
            for left in root.glob(f"{DRAFT}*"):  # of one that was killed; a rank may have begun with this one
                if left.name != f"{DRAFT}{ring.token}":
                    remove_tree(left)
        return ring

    def place_of(self, rank: int) -> int:
        return self.leaders.index(self._leader_of[rank])

    def ask_machines(
        self, work: Callable[[], Sequence[T]], decoder: msgspec.msgpack.Decoder[tuple[T, ...]]
    ) -> list[tuple[T, ...]]:
        """Each machine does this once; what came of it, by machine."""
        said = _together(lambda: tuple(work()) if self.leads else (), decoder)
        return [said[leader] for leader in self.leaders]

    def each_machine(self, work: Callable[[], None]) -> None:
        def done() -> bool:
            if self.leads:
                work()
            return True

        _together(done, _bools)

    def move(self, folder: Path, plan: Plan) -> None:
        """Files from machine to machine, into the same folder there."""
        if not plan:
            return
        moving = _Moving(folder)
        if self.leads:
            count, place = len(self.leaders), self.place_of(self.rank)
            for shift in range(1, count):
                to, source = (place + shift) % count, (place - shift) % count
                leaving, coming = plan.get((place, to), ()), plan.get((source, place), ())
                moving.swap(leaving, self.leaders[to], coming, self.leaders[source])
        self.each_machine(moving.end)


def _come(root: Path, errand: _Errand) -> _Errand:
    _refuse_guests()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    (root / f"{_HERE}{errand.token}").touch()
    return errand


def _refuse_guests() -> None:
    """DCP unpickles what ranks send. In a run the agent knows whose machines take part in it."""
    if not os.environ.get("BARNRAISE_LAUNCHED"):
        return
    guests = guests_of(*_ask_agent(os.environ["BARNRAISE_RUN"]))
    if guests:
        raise RunError(
            f"{', '.join(guests)} takes part as a guest, and DCP would unpickle what its workers send",
            hint="Name only owners' machines with `--on`, or train with `barnraise.init()`.",
        )


def guests_of(run: WatchResponse, cluster: StatusResponse) -> list[str]:
    """The machines of a run that are not known as owners'."""
    owners = {node.name for node in cluster.nodes if node.role == "owner"}
    return sorted({worker.name for worker in run.workers} - owners)


def _ask_agent(run: str) -> tuple[WatchResponse, StatusResponse]:
    with ListenerClient.connect(state_directory(load_settings())) as client:
        watch = decode_told(client.ask(encode(WatchRequest(run=run, wait_s=0.0)), _ANSWER_S))
        status = decode_told(client.ask(encode(StatusRequest()), _ANSWER_S))
    if not isinstance(watch, WatchResponse) or not isinstance(status, StatusResponse):
        raise AgentError("the agent does not say who takes part in this run")
    return watch, status


# what is sent


class _Piece(NamedTuple):
    file: ShardFile
    offset: int
    size: int


def _pieces(files: Sequence[ShardFile]) -> Iterator[_Piece]:
    for file in files:
        for offset in range(0, max(1, file.size), _CHUNK):
            yield _Piece(file, offset, min(_CHUNK, file.size - offset))


class _Moving:
    """Sends and receives to the end whatever its disk says, because the others wait for that."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._device = _device()
        self._failure = ""
        self._come, self._say_at = 0, time.monotonic() + _SAY_S

    def swap(self, leaving: Sequence[ShardFile], to: int, coming: Sequence[ShardFile], source: int) -> None:
        """All machines do this at once, so that the n-th round here is the n-th of ``to`` and ``source``."""
        arrived: tuple[_Piece, torch.Tensor] | None = None
        for out, into in zip_longest(_pieces(leaving), _pieces(coming)):
            data = torch.empty(into.size if into else 0, dtype=torch.uint8, device=self._device)
            operations = [dist.P2POp(dist.irecv, data, source)] if data.numel() else []
            if out and out.size:
                operations.append(dist.P2POp(dist.isend, self._read(out).to(self._device), to))
            works = dist.batch_isend_irecv(operations) if operations else []
            if arrived:  # written while the next one travels
                self._write(*arrived)
            for work in works:
                work.wait()
            arrived = (into, data) if into else None
        if arrived:
            self._write(*arrived)

    def end(self) -> None:
        if self._failure:
            raise RunError(self._failure, hint=_TRY_AGAIN)

    def _read(self, piece: _Piece) -> torch.Tensor:
        data = torch.zeros(piece.size, dtype=torch.uint8)
        try:
            with open(self._folder / piece.file.name, "rb") as file:
                file.seek(piece.offset)
                file.readinto(data.numpy().data)
        except OSError as error:
            self._fail(str(error))
        return data

    def _write(self, piece: _Piece, data: torch.Tensor) -> None:
        file, part = piece.file, self._folder / f"{_PART}{piece.file.name}"
        try:
            with open(part, "ab" if piece.offset else "wb") as opened:
                opened.write(data.cpu().numpy().data)
            if piece.offset + piece.size == file.size:
                sync_path(part)
                if is_whole(part, file):
                    part.replace(self._folder / file.name)
                else:
                    self._fail(f"{file.name} did not come as its manifest says")
        except OSError as error:
            self._fail(str(error))
        self._come += piece.size
        if time.monotonic() > self._say_at:
            self._say_at = time.monotonic() + _SAY_S
            log.warning("of the files of %s %s have come", self._folder.name, format_size(self._come))

    def _fail(self, words: str) -> None:
        self._failure = self._failure or words


class _Said(msgspec.Struct, frozen=True, array_like=True):
    value: bytes
    failure: Annotated[str, Meta(max_length=_LONGEST_FAILURE)] = ""
    hint: Annotated[str, Meta(max_length=_LONGEST_FAILURE)] = ""


def _together(work: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
    """What came of it on each rank; RunError on all of them if it failed on any."""
    try:
        own = _Said(msgspec.msgpack.encode(work()))
    except (OSError, BarnraiseError) as error:
        hint = error.hint if isinstance(error, BarnraiseError) else _TRY_AGAIN
        own = _Said(b"", _words(error), hint[:_LONGEST_FAILURE])
    problem = "what another rank says cannot be read"
    said = [decode(_saids, data, problem) for data in _gather(msgspec.msgpack.encode(own))]
    failed: dict[str, list[str]] = {}
    for rank, one in enumerate(said):
        if one.failure:
            failed.setdefault(one.failure, []).append(str(rank))
    if failed:
        reasons = "; ".join(f"rank {', '.join(ranks)}: {words}" for words, ranks in failed.items())
        raise RunError(reasons, hint=next(one.hint for one in said if one.failure))
    return [decode(decoder, one.value, problem) for one in said]


def _gather(word: bytes) -> list[bytes]:
    if not dist.is_initialized():
        return [word]
    device = _device()
    size = torch.tensor([len(word)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = [int(one) for one in sizes]
    if not 0 < min(lengths) <= max(lengths) <= _LARGEST_WORD:
        raise ProtocolError(f"a rank wants to say {max(lengths)} bytes, too many")
    padded = torch.frombuffer(bytearray(word.ljust(max(lengths), b"\0")), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded)
    return [row[:length].cpu().numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]


def _device() -> str:
    """Where the group takes tensors: main memory, if it can."""
    if not dist.is_initialized():
        return "cpu"
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
    return "cpu" if "cpu" in kinds else kinds[0]


# what DCP does


class _Writer(FileSystemWriter):
    """Leaves its path out of what DCP pickles: Windows cannot unpickle that of another system."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _Reader(FileSystemReader):
    """Has those files brought that this rank's part of the plan needs."""

    def __init__(self, place: Path, fetch: Callable[[Collection[str]], None]) -> None:
        super().__init__(place)
        self._fetch = fetch

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        self._fetch({self.storage_data[item.storage_index].relative_path for item in plan.items})
        return super().read_data(plan, planner)


@contextmanager
def _named_failures(what: str) -> Iterator[None]:
    """DCP tells every rank what went wrong on any of them."""
    try:
        yield
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {_words(one[0])}" for rank, one in error.failures.items())
        raise RunError(f"{what}: {reasons}", hint=_TRY_AGAIN) from error


def _words(error: BaseException) -> str:
    return (error.message if isinstance(error, BarnraiseError) else str(error))[:_LONGEST_FAILURE]


_saids = msgspec.msgpack.Decoder(_Said)
_errands = msgspec.msgpack.Decoder(_Errand)
_bools = msgspec.msgpack.Decoder(bool)
_ranks: msgspec.msgpack.Decoder[int] = msgspec.msgpack.Decoder(Annotated[int, Meta(ge=0)])
_lists: msgspec.msgpack.Decoder[tuple[ShardFile, ...]] = msgspec.msgpack.Decoder(tuple[ShardFile, ...])
_inventories: msgspec.msgpack.Decoder[tuple[HeldShards, ...]] = msgspec.msgpack.Decoder(
    tuple[HeldShards, ...]
)
_numbers: msgspec.msgpack.Decoder[tuple[int, ...]] = msgspec.msgpack.Decoder(tuple[int, ...])
_names: msgspec.msgpack.Decoder[tuple[str, ...]] = msgspec.msgpack.Decoder(tuple[str, ...])
