"""Cutting into pieces: every byte once, all ranks alike, odd layouts as they should be."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from barnraise.collectives.ops import chunking, movement, operation, reduction
from barnraise.collectives.ops.chunking import DenseView, chunk_ranges, cut_blocks, write_back
from barnraise.collectives.ops.operation import Operation
from barnraise.collectives.ops.tensors import check_blocks, element_type_of, only, split_blocks, split_rows
from barnraise.core.errors import OperationMismatch, UnsupportedOperation

SUM = torch.distributed.ReduceOp(torch.distributed.ReduceOp.SUM)


@given(st.integers(0, 40 << 20), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 64))
def test_chunk_ranges_cover_all_bytes_and_cut_no_element(count: int, item: int, parts: int) -> None:
    total = count // item * item
    cuts = chunk_ranges(total, item, parts)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == total
    assert all(first[1] == second[0] for first, second in pairwise(cuts))
    assert all(lo % item == 0 and hi % item == 0 for lo, hi in cuts)
    longest = max(hi - lo for lo, hi in cuts)
    assert longest * parts <= chunking.CHUNK_BYTES * 1.5 + item * parts


def test_chunk_ranges_of_zero_bytes_is_one_empty_range() -> None:
    assert chunk_ranges(0, 4) == [(0, 0)]


def test_short_blocks_are_empty_in_later_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 32)
    flats = [torch.arange(9), torch.arange(2)]
    cut = [[(lo, hi) for _, lo, hi in row] for row in cut_blocks(flats, 8)]
    assert cut == [[(0, 2), (0, 2)], [(2, 4), (2, 2)], [(4, 6), (2, 2)], [(6, 8), (2, 2)], [(8, 9), (2, 2)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_contiguous_tensors_are_not_copied(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 2).to(dtype)
    whole = DenseView.of(tensor)
    assert not whole.copied
    assert whole.bytes.data_ptr() == tensor.data_ptr()
    assert whole.bytes.numel() == 6 * tensor.element_size()
    assert write_back([whole]) is None


def test_strided_and_conjugated_tensors_are_written_back() -> None:
    strided = torch.zeros(2, 3).t()
    conjugated = torch.zeros(2, dtype=torch.complex64).conj()
    outputs = [DenseView.of(strided), DenseView.of(conjugated)]
    assert all(output.copied for output in outputs)
    outputs[0].values.copy_(torch.arange(6.0).view(3, 2))
    outputs[1].bytes.copy_(torch.tensor([1 + 2j, 3j], dtype=torch.complex64).view(torch.uint8))
    finish = write_back(outputs)
    assert finish is not None
    finish()
    assert strided.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert conjugated.tolist() == [1 + 2j, 3j]


def test_write_to_parameters_bypasses_autograd() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    DenseView.of(parameter).flat[:2].copy_(torch.ones(2))
    assert parameter.tolist() == [1, 1, 0]
    assert parameter._version == 0


def _stage(call: Operation) -> list[torch.Tensor]:
    """Fill fresh memory for each piece, as the communication process would find it."""
    memory = [torch.full((chunk.nbytes,), 170, dtype=torch.uint8) for chunk in call.chunks]
    for chunk, view in zip(call.chunks, memory, strict=True):
        chunk.fill(view)
    return memory


def _settle(call: Operation, memory: list[torch.Tensor]) -> None:
    for chunk, view in zip(call.chunks, memory, strict=True):
        chunk.drain(view)
    if call.finish is not None:
        call.finish()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 48)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("elements", [0, 1, 7, 64])
def test_reduction_chunks_return_staged_sum(elements: int) -> None:
    tensor = torch.arange(float(elements))
    call = reduction.all_reduce(tensor, SUM, 2)
    memory = _stage(call)
    for view in memory:
        view.view(torch.float32).mul_(2)
    _settle(call, memory)
    assert tensor.tolist() == [2.0 * value for value in range(elements)]
    assert call.agreed_bytes == call.staged_bytes == elements * 4


@pytest.mark.usefixtures("small_chunks")
def test_reduce_changes_only_the_root() -> None:
    for root in (0, 1):
        tensor = torch.ones(20)
        call = reduction.reduce(tensor, SUM, root, 0, 2)
        memory = _stage(call)
        for view in memory:
            view.zero_()
        _settle(call, memory)
        assert tensor.sum() == (0 if root == 0 else 20)


@pytest.mark.usefixtures("small_chunks")
def test_coalesced_tensors_keep_their_shapes() -> None:
    first, second = torch.ones(3, 5), torch.ones(4, 2).t()
    call = reduction.all_reduce_coalesced([first, second], SUM, 2)
    memory = _stage(call)
    for view in memory:
        view.view(torch.float32).mul_(3)
    _settle(call, memory)
    assert first.eq(3).all()
    assert second.eq(3).all()
    with pytest.raises(UnsupportedOperation):
        reduction.all_reduce_coalesced([first, first.double()], SUM, 2)


@pytest.mark.usefixtures("small_chunks")
def test_reduce_scatter_keeps_this_ranks_block() -> None:
    output = torch.zeros(3, 2).t()
    blocks = [torch.full((2, 3), float(rank)) for rank in range(4)]
    call = reduction.reduce_scatter(output, blocks, SUM, 2, 4)
    _settle(call, _stage(call))
    assert output.eq(2).all()
    with pytest.raises(OperationMismatch):
        reduction.reduce_scatter(torch.zeros(5), blocks, SUM, 2, 4)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("elements", [0, 1, 37])
def test_gather_and_scatter_chunk_sizes_match_on_all_ranks(elements: int) -> None:
    tensor = torch.arange(elements)
    outputs = [torch.zeros(elements, dtype=torch.int64) for _ in range(3)]
    root = movement.gather(outputs, tensor, 1, 1, 3)
    leaf = movement.gather([], tensor, 1, 0, 3)
    assert [chunk.sizes for chunk in root.chunks] == [chunk.sizes for chunk in leaf.chunks]
    memory = _stage(root)
    for chunk, view, theirs in zip(root.chunks, memory, _stage(leaf), strict=True):
        view[: chunk.sizes[0]] = theirs
    _settle(root, memory)
    assert outputs[0].tolist() == outputs[1].tolist() == list(range(elements))
    inputs = [tensor + rank for rank in range(3)]
    spread = movement.scatter(outputs[2], inputs, 1, 1, 3)
    other = movement.scatter(outputs[0], [], 1, 2, 3)
    assert [chunk.sizes for chunk in spread.chunks] == [chunk.sizes for chunk in other.chunks]
    given = _stage(spread)
    _settle(spread, given)
    _settle(other, [view[2 * p.sizes[0] :] for view, p in zip(given, spread.chunks, strict=True)])
    assert outputs[2].tolist() == inputs[1].tolist()
    assert outputs[0].tolist() == inputs[2].tolist()


@pytest.mark.usefixtures("small_chunks")
def test_all_gather_and_broadcast_move_every_byte() -> None:
    source = torch.arange(11, dtype=torch.int16)
    outputs = [torch.zeros(11, dtype=torch.int16), torch.zeros(2, 11, dtype=torch.int16).t()[:, 1]]
    call = movement.all_gather(outputs, source, outputs, 1, 2)
    memory = _stage(call)
    for chunk, view in zip(call.chunks, memory, strict=True):
        view[: chunk.sizes[0]] = view[chunk.sizes[0] :]
    _settle(call, memory)
    assert outputs[0].tolist() == outputs[1].tolist() == source.tolist()
    sent = _stage(movement.broadcast(source * 2, 0, 0))
    received = torch.zeros(22, dtype=torch.int16)[::2]
    _settle(movement.broadcast(received, 0, 1), sent)
    assert received.tolist() == (source * 2).tolist()
    with pytest.raises(OperationMismatch):
        movement.all_gather(outputs, source[:3], outputs, 1, 2)


def test_all_to_all_keeps_its_own_block_and_uneven_splits() -> None:
    source = torch.arange(10.0).view(5, 2)
    target = torch.zeros(4, 2)
    inputs, outputs = split_rows(source, [4, 1], 2), split_rows(target, [1, 3], 2)
    with pytest.raises(OperationMismatch):
        movement.all_to_all(outputs, inputs, [target], 0, 2)
    outputs = split_rows(target, [3, 1], 2)
    call = movement.all_to_all(outputs, inputs, [target], 1, 2)
    assert call.splits == ((32, 8), (24, 8))
    assert call.agreed_bytes == 0
    memory = _stage(call)
    memory[0][40:64] = torch.tensor([5.0] * 6).view(torch.uint8)
    _settle(call, memory)
    assert target.tolist() == [[5, 5], [5, 5], [5, 5], [8, 9]]


def test_point_to_point_transfers_one_tensor() -> None:
    target = torch.zeros(6)[::2]
    _settle(operation.receive(target), _stage(operation.send(torch.tensor([1.0, 2, 3]))))
    assert target.tolist() == [1, 2, 3]


def test_invalid_tensors_are_rejected() -> None:
    with pytest.raises(UnsupportedOperation):
        element_type_of(torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedOperation):
        only([torch.ones(1), torch.ones(1)])
    assert only(torch.ones(1)).item() == 1
    with pytest.raises(OperationMismatch):
        split_blocks(torch.ones(5), torch.ones(2), 2)
    with pytest.raises(UnsupportedOperation):
        split_blocks(torch.ones(2, 2).t(), torch.ones(2), 2)
    assert [block.numel() for block in split_blocks(torch.ones(0), torch.ones(0), 3)] == [0, 0, 0]
    with pytest.raises(OperationMismatch):
        split_rows(torch.ones(5), [], 2)
    with pytest.raises(OperationMismatch):
        split_rows(torch.ones(5), [1, 1], 2)
    with pytest.raises(OperationMismatch):
        check_blocks([torch.ones(1)], element_type_of(torch.ones(1)), 2)
    with pytest.raises(OperationMismatch):
        check_blocks([torch.ones(1), torch.ones(1).int()], element_type_of(torch.ones(1)), 2)
