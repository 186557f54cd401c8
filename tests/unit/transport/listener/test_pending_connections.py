"""Limits of pending connections."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from barnraise.transport.listener.pending_connections import PendingConnections


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200))
def test_pending_connections_never_exceed_limits(events: list[tuple[int, bool]]) -> None:
    room: PendingConnections[int] = PendingConnections(total=8, per_source=3)
    present: list[tuple[int, str]] = []
    for guest, (number, enters) in enumerate(events):
        source = str(number)
        if enters:
            while (oldest := room.oldest_in_the_way(source)) is not None:
                of_source = [entry for entry in present if entry[1] == source]
                assert oldest == (of_source if len(of_source) >= 3 else present)[0][0]
                room.leave(oldest)
                present = [entry for entry in present if entry[0] != oldest]
            room.enter(guest, source)
            present.append((guest, source))
        elif present:
            removed = present.pop(number % len(present))[0]
            room.leave(removed)
            room.leave(removed)
        assert room.everyone() == [entry[0] for entry in present]
        assert len(room) <= 8
    for leaving in room.everyone():
        room.leave(leaving)
    assert not room._guests
