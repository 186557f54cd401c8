"""One process group as a training step uses it: all-reduce, all-gather of messages, and send/receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from barnraise.collectives.c10d import default_group
from barnraise.collectives.c10d.process_group import BarnraiseProcessGroup
from barnraise.compression import sum_over
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, RunError
from barnraise.planning.cost.rank_layout import RankLayout
from barnraise.training.group.interface import Encoding, PendingWork

_MAX_MESSAGE = 4 << 20
_SHORT_MESSAGE = 1016
_LENGTH_BYTES = 8
_layouts = msgspec.msgpack.Decoder(tuple[tuple[Annotated[tuple[int, ...], Meta(min_length=1)], ...], bool])


class TrainingGroup:
    """Collective operations of one generation, or of one recovery attempt.

    The first ``training_world`` ranks train; later ranks are joining workers. ``choose_layout`` returns the
    sites of the ranks; rank 0 decides for all.
    """

    def __init__(
        self,
        process_group: BarnraiseProcessGroup,
        rank: int,
        world: int,
        training_world: int,
        choose_layout: Callable[[], RankLayout] = RankLayout,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._process_group = process_group
        self.rank, self.world, self.training_world = rank, world, training_world
        self.nodes = process_group.nodes  # node ids of the other ranks
        self._choose_layout, self._on_close = choose_layout, on_close
        self._is_layout_known = training_world <= 2  # two workers have nothing to choose

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingWork:
        """Start to sum the tensor over all workers, in place."""
        self._agree_on_sites()
        return self._process_group.allreduce([tensor])

    def all_reduce_compressed(self, own: Encoding) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return the sum of all workers' encodings, and a callback that keeps the codec's error."""
        self._agree_on_sites()
        tensor, codec, turn, parts, feedback = own
        result = sum_over(
            self._process_group,
            tensor,
            codec,
            turn,
            parts=parts,
            feedback=feedback,
            if_not_finite="nan",
            sites=self._process_group.sites,
        )
        return result.values, result.keep

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return every rank's message, by rank. Short messages need one round trip only."""
        header = len(message).to_bytes(_LENGTH_BYTES, "little")
        rows = self._gather_rows(header + message[:_SHORT_MESSAGE], _SHORT_MESSAGE + _LENGTH_BYTES)
        lengths = [int.from_bytes(row[:_LENGTH_BYTES], "little") for row in rows]
        longest = max(lengths)
        if longest > _MAX_MESSAGE:
            raise RunError(f"a worker sent a message of {longest} bytes; the limit is {_MAX_MESSAGE}")
        if longest > _SHORT_MESSAGE:
            rest = self._gather_rows(message[_SHORT_MESSAGE:], longest - _SHORT_MESSAGE)
            rows = [row + more for row, more in zip(rows, rest, strict=True)]
        pairs = zip(rows, lengths, strict=True)
        return [row[_LENGTH_BYTES : _LENGTH_BYTES + length] for row, length in pairs]

    def send_async(self, tensor: torch.Tensor, to: int) -> PendingWork:
        """Start to send a tensor to a rank."""
        return self._process_group.send([tensor], to)

    def receive_async(self, tensor: torch.Tensor, sender: int) -> PendingWork:
        """Start to receive a tensor from a rank, in place."""
        return self._process_group.recv([tensor], sender)

    def make_default(self) -> None:
        """Make this group the default group of torch.distributed, until it is closed."""
        default_group.make_default(self._process_group)

    def abort(self) -> None:
        """Fail every pending operation now."""
        self._process_group.abort()

    def close(self) -> None:
        """Shut the process group down."""
        try:
            default_group.remove_default(self._process_group)
            self._process_group.shutdown()
        finally:
            self._on_close()

    def _agree_on_sites(self) -> None:
        """Use rank 0's site layout from the first all-reduce on.

        This is done lazily, so that ranks that only check for completion are not delayed.
        """
        if self._is_layout_known:
            return
        self._is_layout_known = True
        own = msgspec.msgpack.encode(self._choose_layout()) if self.rank == 0 else b""
        received = self.all_gather_bytes(own)[0]
        try:
            sites, are_places = decode(_layouts, received, "a site layout")
        except ProtocolError:  # rank 0 may be a guest; all ranks receive the same bytes
            sites, are_places = RankLayout()
        is_complete = sorted(rank for site in sites for rank in site) == list(range(self.world))
        self._process_group.set_sites(sites if is_complete else (), are_places=are_places)

    def _gather_rows(self, data: bytes, width: int) -> list[bytes]:
        """Return every rank's data, padded to ``width`` bytes."""
        own = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        rows = torch.zeros(self.world * width, dtype=torch.uint8)
        self._process_group.all_gather_single(rows, own).wait()
        return [bytes(row.numpy()) for row in rows.view(self.world, width)]
