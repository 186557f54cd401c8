"""Maps with a member that breaks the protocol: wrong sizes, items that it was not given, and other bits."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from barnraise.core.errors import BarnraiseError
from barnraise.training.mapping.encoded_values import MAX_RESULT_BYTES, encode_value
from barnraise.training.mapping.exchange import _Hello, _Holding, _Status
from barnraise.training.mapping.mapper import _fingerprint
from barnraise.training.mapping.result_store import MAX_ITEMS, ResultStore, bits_of_bitmap
from barnraise.training.mapping.result_stream import MAX_PIECE
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.threaded_group import ThreadWorker, run_workers

ITEMS = 8
KEY = (0, 1)
HELLO = _Hello(KEY, ITEMS, _fingerprint(range(ITEMS)))
NOTHING = _Holding(bytes(1), bytes(1))


class Hostile:
    """Member 1 of a group of two, which sends what a test wants."""

    def __init__(self, worker: ThreadWorker) -> None:
        self._worker = worker
        self.store = ResultStore(ITEMS, b"")

    def gather(self, message: msgspec.Struct | bytes) -> list[bytes]:
        encoded = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        return self._worker.all_gather_bytes(encoded)

    def round(self, sent: bytes = b"", **fields: Any) -> None:
        """Report, send a piece, and keep what the other one sends."""
        fields = {"newest_generation": 1, "piece": len(sent), **fields}
        other = msgspec.msgpack.decode(self.gather(_Status(**fields))[0], type=_Status)
        if sent:
            self._worker.send_async(torch.frombuffer(bytearray(sent), dtype=torch.uint8), 0)
        if other.piece:
            received = torch.empty(other.piece, dtype=torch.uint8)
            self._worker.receive_async(received, 0).wait()
            data = received.numpy().tobytes()
            while data:
                item, length = struct.unpack_from("<QQ", data)
                self.store.add(item, data[16 : 16 + length])
                data = data[16 + length :]

    def meet(self, holding: _Holding | bytes = NOTHING) -> None:
        self.gather(HELLO)
        self.gather(holding)


def result(item: int, value: object) -> bytes:
    content = encode_value(value, "a result")
    return struct.pack("<QQ", item, len(content)) + content


def attacked(attack: Callable[[Hostile], None]) -> list[str] | str:
    """Return the results of the honest member, or its error."""

    def member(worker: ThreadWorker) -> list[str] | str:
        if worker.rank:
            try:
                attack(Hostile(worker))
                worker.all_gather_bytes(b"until the other one has noticed")
            except threading.BrokenBarrierError:
                pass
            return ""
        run = Session(worker, seed=0, unit=0, checkpoints=CheckpointManager(None, 60.0, 1))
        try:
            return run.map(
                lambda item: time.sleep(0.01 if item < 7 else 0.6) or f"honest {item}", range(ITEMS)
            )
        except BarnraiseError as error:
            return error.message
        finally:
            worker._exchange.barrier.abort()

    return run_workers(2, member)[0]


def after_meeting(*rounds: dict[str, Any]) -> Callable[[Hostile], None]:
    def attack(hostile: Hostile) -> None:
        hostile.meet()
        for fields in rounds:
            hostile.round(**fields)

    return attack


UNREADABLE = "a message of another worker about a map cannot be read"


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (lambda hostile: hostile.gather(b"\xc1"), UNREADABLE),
        (lambda hostile: hostile.gather(_Hello(KEY, MAX_ITEMS + 1)), UNREADABLE),
        (lambda hostile: hostile.gather(_Hello(KEY, ITEMS, bytes(33))), UNREADABLE),
        (lambda hostile: hostile.gather(_Hello(KEY, ITEMS, b"other items")), "with different items"),
        (lambda hostile: hostile.gather(_Hello(KEY, ITEMS + 1, HELLO.fingerprint)), "with different items"),
        (lambda hostile: hostile.meet(_Holding(bytes(2), bytes(1))), "does not fit the map"),
        (lambda hostile: hostile.meet(_Holding(bytes(1), b"")), "does not fit the map"),
        (lambda hostile: hostile.meet(_Holding(bytes(1), bytes(1), (ITEMS,))), "claims an item that the map"),
        (lambda hostile: hostile.meet(_Holding(bytes(1), bytes(1), (MAX_ITEMS,))), UNREADABLE),
        (after_meeting({"piece": MAX_PIECE + 1}), UNREADABLE),
        (after_meeting({"item_s": -1.0}), UNREADABLE),
        (after_meeting({"failed": (MAX_ITEMS, "x")}), UNREADABLE),
        (after_meeting({"failed": (1, "x" * 601)}), UNREADABLE),
    ],
)
def test_message_that_breaks_the_protocol_ends_the_map_with_an_error(
    attack: Callable[[Hostile], None], words: str
) -> None:
    assert words in attacked(attack)


@pytest.mark.parametrize("item", [3, ITEMS, 1 << 63])
def test_result_of_an_item_that_was_not_assigned_is_refused(item: int) -> None:
    """In the first round nothing is assigned yet."""

    def attack(hostile: Hostile) -> None:
        hostile.meet()
        hostile.round(result(item, "hostile"))

    assert f"sent the result of item {item}, which was not assigned to it" in attacked(attack)


def test_result_of_an_item_of_another_worker_is_refused() -> None:
    """It says that it is busy, so that it gets no items."""

    def attack(hostile: Hostile) -> None:
        hostile.meet()
        hostile.round(held=100, item_s=100.0)
        hostile.round(result(7, "hostile"), held=100, item_s=100.0)

    assert "which was not assigned to it" in attacked(attack)


def test_announced_size_of_a_result_is_bounded() -> None:
    def attack(hostile: Hostile) -> None:
        hostile.meet()
        hostile.round(struct.pack("<QQ", 0, MAX_RESULT_BYTES + 1))

    assert f"announces a result of {MAX_RESULT_BYTES + 1} bytes" in attacked(attack)


def test_first_result_of_an_item_counts() -> None:
    """The member computes its item, and then sends others, also for items of the honest worker."""

    def attack(hostile: Hostile) -> None:
        hostile.meet(_Holding(bytes(1), bytes(1), (2,)))
        content = result(2, "first") + result(2, "second")
        hostile.store.add(2, encode_value("first", "it"))
        hostile.round(content, held=100, item_s=100.0)
        while not hostile.store.is_complete:
            late = [item for item in range(ITEMS) if item in hostile.store]
            hostile.round(b"".join(result(item, "late") for item in late), held=100, item_s=100.0)
        hostile.gather(hostile.store.digest())

    assert attacked(attack) == ["first" if item == 2 else f"honest {item}" for item in range(ITEMS)]


def test_items_that_were_given_back_by_another_worker_are_not_computed_twice() -> None:
    def attack(hostile: Hostile) -> None:
        hostile.meet()
        while not hostile.store.is_complete:
            hostile.round(held=100, item_s=100.0, given_back=(*range(ITEMS), ITEMS, MAX_ITEMS - 1))
        hostile.gather(hostile.store.digest())

    assert attacked(attack) == [f"honest {item}" for item in range(ITEMS)]


def test_results_that_are_announced_and_not_sent_are_missed() -> None:
    """Even if the member sends the hash that the honest worker has: that of no results."""

    def attack(hostile: Hostile) -> None:
        hostile.meet(_Holding(b"\xff", b"\xff"))
        hostile.round()
        hostile.gather(hostile.store.digest())

    assert bits_of_bitmap(b"\xff", ITEMS).all()
    assert "has announced results of a map that it did not send" in attacked(attack)


def test_other_bits_of_a_result_are_noticed() -> None:
    def attack(hostile: Hostile) -> None:
        hostile.meet()
        while not hostile.store.is_complete:
            hostile.round(held=100, item_s=100.0)
        hostile.gather(bytes(32))

    assert "hold different results of run.map" in attacked(attack)


def test_words_of_a_failure_cannot_control_the_terminal() -> None:
    message = attacked(after_meeting({"failed": (1, "\x1b[2Jgone\r\nfake line")}))
    assert "item 1 failed" in message
    assert "gone" in message
    assert all(character.isprintable() for character in message)
