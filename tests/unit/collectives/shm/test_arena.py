"""Shared memory as tensors, and the way of tensors of other devices, which are faked here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from barnraise.collectives.shm import arena as arena_module
from barnraise.collectives.shm.arena import SharedArena, copy_context
from barnraise.core.config import CollectiveSettings, Settings
from barnraise.core.errors import UnsupportedOperation
from tests.unit.collectives.fake_comm_process import FakeCommProcess

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


def _arena(**collectives: object) -> tuple[SharedArena, FakeCommProcess]:
    settings = msgspec.structs.replace(Settings(), collectives=CollectiveSettings(**collectives))  # type: ignore[arg-type]
    comm_process = FakeCommProcess(settings)
    return SharedArena(comm_process), comm_process


class FakeCuda:
    """The CUDA runtime, counting what is page-locked."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert size >= 64 << 20
        assert flags == 0
        if self.code == 0:
            self.locked.add(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


def test_allocated_blocks_are_views_of_mapped_segments() -> None:
    arena, comm_process = _arena()
    first, second = arena.allocate(10), arena.allocate(100 << 20)
    assert comm_process.mapped == {0: 64 << 20, 1: 100 << 20}
    arena.view(first, 10).fill_(7)
    assert arena.view(first, 10).tolist() == [7] * 10
    assert arena.view(second, 100 << 20).numel() == 100 << 20
    arena.free(first)
    assert arena.allocate(20) == first


def test_idle_segments_above_limit_are_unmapped() -> None:
    arena, comm_process = _arena(arena_bytes=80 << 20)
    blocks = [arena.allocate(60 << 20) for _ in range(3)]
    assert not arena.has_room(1 << 20)
    view = arena.view(blocks[0], 4)
    arena.free(blocks[0])
    view.fill_(1)  # a view that is still held stays valid
    assert sorted(comm_process.mapped) == [1, 2]
    arena.free(blocks[1])
    assert sorted(comm_process.mapped) == [2]
    arena.free(blocks[2])
    assert sorted(comm_process.mapped) == [2]
    assert arena.has_room(80 << 20)


def test_segment_created_in_inference_mode_is_writable_later() -> None:
    arena, _ = _arena()
    with torch.inference_mode():
        block = arena.allocate(8)
    arena.view(block, 8).fill_(1)


def test_device_staging_logs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    arena, _ = _arena()
    with caplog.at_level(logging.WARNING, "barnraise.collectives"):
        for _ in range(3):
            arena.check_device(CPU)
            arena.check_device(MPS)
    assert [record.getMessage() for record in caplog.records] == [
        "mps tensors are staged through host memory on their way to other machines"
    ]


@pytest.mark.parametrize("device", [CUDA, MPS])
def test_device_staging_forbidden_by_settings_raises(device: torch.device) -> None:
    arena, _ = _arena(staging="refuse")
    arena.check_device(CPU)
    for _ in range(2):
        with pytest.raises(UnsupportedOperation, match="forbids"):
            arena.check_device(device)


def test_meta_tensor_is_rejected() -> None:
    arena, _ = _arena()
    with pytest.raises(UnsupportedOperation, match="meta"):
        arena.check_device(torch.device("meta"))


def test_cuda_segments_are_page_locked_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeCuda()
    monkeypatch.setattr(arena_module, "_cuda_runtime", lambda: runtime)
    arena, _ = _arena(arena_bytes=80 << 20)
    before = arena.allocate(60 << 20)
    arena.check_device(CUDA)
    assert len(runtime.locked) == 1
    after = arena.allocate(60 << 20)
    assert len(runtime.locked) == 2
    arena.free(before)
    assert len(runtime.locked) == 1
    arena.free(after)


def test_failed_page_lock_keeps_segment_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeCuda(code=2)
    monkeypatch.setattr(arena_module, "_cuda_runtime", lambda: runtime)
    arena, _ = _arena(arena_bytes=80 << 20)
    arena.check_device(CUDA)
    for block in [arena.allocate(60 << 20) for _ in range(2)]:
        arena.view(block, 1).fill_(1)
        arena.free(block)
    assert runtime.locked == set()


def test_cuda_copies_run_on_own_stream_after_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class FakeStream:
        def __init__(self, device: torch.device | None = None, name: str = "copies") -> None:
            self.name = name

        def record_event(self) -> str:
            events.append(f"{self.name} records")
            return f"event of {self.name}"

        def wait_event(self, event: str) -> None:
            events.append(f"{self.name} waits for {event}")

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        events.append(f"on {stream.name}")
        yield
        events.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(name="caller"))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(arena_module, "_copy_streams", {})
    context = copy_context(CUDA, [])
    assert events == ["caller records"]
    with context():
        events.append("copy")
    assert events[1:] == ["on copies", "copies waits for event of caller", "copy", "off copies"]


def test_inference_tensors_can_be_written_from_any_thread() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    with copy_context(CPU, [tensor])():
        tensor.data.copy_(torch.ones(2))
    assert tensor.tolist() == [1, 1]
    with torch.inference_mode():
        context = copy_context(CPU, [])
    assert not torch.is_inference_mode_enabled()
    with context():
        assert torch.is_inference_mode_enabled()
    with copy_context(CPU, [torch.zeros(1)])():
        assert not torch.is_inference_mode_enabled()
