"""One group of workers, as the session uses it: words, sums, and tensors from one to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from barnraise.collectives.process_group import BarnraiseProcessGroup
from barnraise.compression import sum_over
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, RunError
from barnraise.planning.cost.rank_layout import RankLayout
from barnraise.planning.inputs.levels import Levels
from barnraise.training.gradients.compressed_reducer import Encoding
from barnraise.training.gradients.reducer import PendingWork

_LARGEST_WORD = 4 << 20
_SHORT_WORD = 1016
_LENGTH_BYTES = 8
_SITES = msgspec.msgpack.Decoder(tuple[tuple[Annotated[tuple[int, ...], Meta(min_length=1)], ...], bool])


class TrainingGroup:
    """The first ``members`` ranks train; the others, if any, are newcomers."""

    def __init__(self, group: BarnraiseProcessGroup, rank: int, world: int, members: int) -> None:
        self._group = group
        self.rank, self.world, self.members = rank, world, members
        self.nodes = group.nodes  # the machines of the other ranks
        self.on_close: Callable[[], None] = lambda: None

    def gather(self, word: bytes) -> list[bytes]:
        # One round for what is short, as nearly all words are: each step waits for it.
        head = len(word).to_bytes(_LENGTH_BYTES, "little")
        rows = self._rows(head + word[:_SHORT_WORD], _SHORT_WORD + _LENGTH_BYTES)
        lengths = [int.from_bytes(row[:_LENGTH_BYTES], "little") for row in rows]
        longest = max(lengths)
        if longest > _LARGEST_WORD:
            raise RunError(f"a member's word has {longest} bytes, too many")
        if longest > _SHORT_WORD:
            rest = self._rows(word[_SHORT_WORD:], longest - _SHORT_WORD)
            rows = [row + more for row, more in zip(rows, rest, strict=True)]
        pairs = zip(rows, lengths, strict=True)
        return [row[_LENGTH_BYTES : _LENGTH_BYTES + length] for row, length in pairs]

    def tell_levels(self, levels: Levels) -> None:
        """The strategies that a person has fixed for the whole run."""
        self._group.set_levels(levels)

    def agree_on_sites(self, mine: RankLayout) -> None:
        """As the first rank says; the others' word does not count."""
        said = msgspec.msgpack.encode(mine) if self.rank == 0 else b""
        heard = self.gather(said)[0]
        try:
            sites, are_places = decode(_SITES, heard, "a word on sites")
        except ProtocolError:  # whoever is first may be a guest; all hear the same
            sites, are_places = RankLayout()
        is_whole = sorted(rank for site in sites for rank in site) == list(range(self.world))
        self._group.set_sites(sites if is_whole else (), are_places=are_places)

    def begin_sum(self, tensor: torch.Tensor) -> PendingWork:
        return self._group.allreduce([tensor])

    def sum_coded(self, mine: Encoding) -> tuple[torch.Tensor, Callable[[], None]]:
        tensor, codec, turn, parts, feedback = mine
        found = sum_over(
            self._group,
            tensor,
            codec,
            turn,
            parts=parts,
            feedback=feedback,
            if_not_finite="nan",
            sites=self._group.sites,
        )
        return found.values, found.keep

    def begin_send(self, tensor: torch.Tensor, to: int) -> PendingWork:
        return self._group.send([tensor], to)

    def begin_receive(self, tensor: torch.Tensor, sender: int) -> PendingWork:
        return self._group.recv([tensor], sender)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        try:
            self._group.shutdown()
        finally:
            self.on_close()

    def _rows(self, data: bytes, width: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        everybody = torch.zeros(self.world * width, dtype=torch.uint8)
        self._group.all_gather_single(everybody, mine).wait()
        return [bytes(row.numpy()) for row in everybody.view(self.world, width)]
