"""Bookkeeping of shared memory: ranges never overlap, and come back whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from barnraise.collectives.shm.allocator import Block, BlockAllocator


def test_allocate_first_fit_and_free_merges_neighbours() -> None:
    blocks = BlockAllocator()
    blocks.add_segment(0, 1024)
    first, second, third = (blocks.allocate(256) for _ in range(3))
    assert (first, second, third) == (Block(0, 0, 256), Block(0, 256, 256), Block(0, 512, 256))
    assert first is not None
    assert second is not None
    assert third is not None
    blocks.free(first)
    blocks.free(third)
    assert blocks.allocate(512) == Block(0, 512, 512)
    blocks.free(Block(0, 512, 512))
    blocks.free(second)
    assert blocks.idle_segments() == [0]
    assert blocks.allocate(1024) == Block(0, 0, 1024)
    assert blocks.allocate(1) is None


def test_allocate_zero_bytes_returns_distinct_blocks() -> None:
    blocks = BlockAllocator()
    blocks.add_segment(3, 4096)
    assert blocks.allocate(0) == Block(3, 0, 256)
    assert blocks.allocate(257) == Block(3, 256, 512)


def test_free_block_of_removed_segment_is_ignored() -> None:
    blocks = BlockAllocator()
    blocks.add_segment(0, 256)
    block = blocks.allocate(1)
    assert block is not None
    blocks.remove_segment(0)
    blocks.free(block)
    assert blocks.idle_segments() == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60))
def test_allocated_ranges_never_overlap(steps: list[tuple[bool, int]]) -> None:
    blocks = BlockAllocator()
    blocks.add_segment(0, 8192)
    blocks.add_segment(1, 4096)
    taken: list[Block] = []
    for take, number in steps:
        if take:
            block = blocks.allocate(number)
            if block is not None:
                assert block.size >= number
                taken.append(block)
        elif taken:
            blocks.free(taken.pop(number % len(taken)))
        for first in taken:
            for second in taken:
                apart = (
                    first.offset + first.size <= second.offset or second.offset + second.size <= first.offset
                )
                assert first is second or first.segment != second.segment or apart
    for block in taken:
        blocks.free(block)
    assert sorted(blocks.idle_segments()) == [0, 1]
