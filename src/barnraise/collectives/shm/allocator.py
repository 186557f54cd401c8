"""First-fit allocator for shared segments. Pure bookkeeping, torch-free."""

from __future__ import annotations

from dataclasses import dataclass

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Block:
    """An allocated range of one segment."""

    segment: int
    offset: int
    size: int


class BlockAllocator:
    """First-fit allocation over the free ranges of each segment; adjacent free ranges are merged."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[int, int]]] = {}  # segment -> sorted (offset, size)
        self._sizes: dict[int, int] = {}

    def add_segment(self, segment: int, size: int) -> None:
        self._free[segment] = [(0, size)]
        self._sizes[segment] = size

    def remove_segment(self, segment: int) -> None:
        del self._free[segment], self._sizes[segment]

    def idle_segments(self) -> list[int]:
        """Return the segments without an allocated block."""
        return [s for s, free in self._free.items() if free == [(0, self._sizes[s])]]

    def allocate(self, size: int) -> Block | None:
        """Return a block of at least ``size`` bytes, or None if no segment has a range this long."""
        need = max(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
        for segment, free in self._free.items():
            for position, (offset, length) in enumerate(free):
                if length >= need:
                    if length == need:
                        del free[position]
                    else:
                        free[position] = (offset + need, length - need)
                    return Block(segment, offset, need)
        return None

    def free(self, block: Block) -> None:
        free = self._free.get(block.segment)
        if free is None:
            return
        offset, size = block.offset, block.size
        position = next((i for i, (start, _) in enumerate(free) if start > offset), len(free))
        if position < len(free) and offset + size == free[position][0]:
            size += free.pop(position)[1]
        if position and sum(free[position - 1]) == offset:
            position -= 1
            start, length = free.pop(position)
            offset, size = start, length + size
        free.insert(position, (offset, size))
