"""A reference is released once, and not while a message with it is under way."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from barnraise.core.errors import RunError
from barnraise.rpc.messages import ReferenceId
from barnraise.rpc.references import RemoteReference, pin_all


class Keeper:
    """Keeper that notes what is dropped."""

    def __init__(self) -> None:
        self.dropped: list[ReferenceId] = []

    def fetch(self, reference: RemoteReference, timeout_s: float) -> Any:
        reference.release()  # another thread may do so
        assert self.dropped == []
        return reference.identity.serial

    def drop(self, identity: ReferenceId) -> None:
        self.dropped.append(identity)


IDENTITY = ReferenceId(1, 5)


def test_reference_is_dropped_once() -> None:
    keeper = Keeper()
    with RemoteReference(keeper, IDENTITY) as reference:
        assert reference.owner == 1
        assert "5 of rank 1" in repr(reference)
    reference.release()
    assert "released" in repr(reference)
    del reference
    assert keeper.dropped == [IDENTITY]


def test_collected_reference_is_dropped() -> None:
    keeper = Keeper()
    reference = RemoteReference(keeper, IDENTITY)
    del reference
    assert keeper.dropped == [IDENTITY]


def test_release_waits_for_the_last_pin() -> None:
    keeper = Keeper()
    reference = RemoteReference(keeper, IDENTITY)
    reference.pin()
    reference.pin()
    reference.release()
    reference.unpin()
    assert keeper.dropped == []
    with pytest.raises(RunError, match="of rank 1 was released here"):
        reference.pin()
    reference.unpin()
    assert keeper.dropped == [IDENTITY]


def test_fetch_pins_the_reference() -> None:
    keeper = Keeper()
    reference = RemoteReference(keeper, IDENTITY)
    assert reference.fetch() == 5
    assert keeper.dropped == [IDENTITY]
    with pytest.raises(RunError, match="was released here"):
        reference.fetch()


def test_pins_of_several_references_are_all_or_none() -> None:
    keeper = Keeper()
    first, second = RemoteReference(keeper, IDENTITY), RemoteReference(keeper, ReferenceId(2, 6))
    second.release()
    with pytest.raises(RunError, match="of rank 2 was released here"):
        pin_all([first, second])
    first.release()
    assert keeper.dropped == [ReferenceId(2, 6), IDENTITY]


def test_reference_is_not_pickled() -> None:
    reference = RemoteReference(Keeper(), IDENTITY)
    with pytest.raises(RunError, match="neither copied nor pickled"):
        pickle.dumps(reference)
