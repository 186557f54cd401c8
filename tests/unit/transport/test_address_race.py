"""Address race: the best address wins with a readable reason, and the others leave no trace."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import HandshakeError, TransportError
from barnraise.transport import address_race
from barnraise.transport.address_race import (
    MOST_ADDRESSES,
    AddressChoice,
    TriedAddress,
    choose,
    dial_best,
    dialable,
)
from barnraise.transport.control.dial import ControlConnection, DialOptions, was_refused
from tests.unit.transport.listening_machines import Machine, Street, run

needs_loopback_network = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere loopback has only one address"
)
NEAR, FAR, DEAD = "192.168.1.5", "10.8.0.2", "192.168.56.1"


def test_choice_reason_has_round_trips() -> None:
    tried = [TriedAddress(FAR, 0.0019), TriedAddress(NEAR, 0.0003), TriedAddress(DEAD)]
    assert choose(tried) == AddressChoice(
        NEAR, "192.168.1.5: 0.3 ms; 10.8.0.2 (1.9 ms) is slower; 192.168.56.1 does not answer"
    )
    assert choose([TriedAddress(NEAR, 0.123)]).reason == "192.168.1.5: 123 ms"
    assert choose([TriedAddress(NEAR, 0.01), TriedAddress(DEAD, error="refuses")]).reason.endswith(
        "192.168.56.1: refuses"
    )


@pytest.mark.parametrize(
    ("current_ms", "other_ms", "changes"),
    [
        (1.0, 0.9, False),  # 10 %
        (0.4, 0.25, False),  # 37 %, but only 0.15 ms
        (0.5, 0.29, True),
        (10.0, 8.5, False),  # 1.5 ms, but only 15 %
        (10.0, 7.9, True),
        (0.3, 5.0, False),
    ],
)
def test_choose_keeps_current_for_small_gain(current_ms: float, other_ms: float, changes: bool) -> None:
    tried = [TriedAddress(FAR, other_ms / 1000), TriedAddress(NEAR, current_ms / 1000)]
    choice = choose(tried, NEAR)
    assert choice.address == (FAR if changes else NEAR)
    assert ("not enough faster" in choice.reason) == (not changes and other_ms < current_ms)
    assert choose(tried).address == (FAR if other_ms < current_ms else NEAR)


def test_choose_drops_current_address_without_answer() -> None:
    assert choose([TriedAddress(NEAR), TriedAddress(FAR, 1.0)], NEAR).address == FAR
    assert choose([TriedAddress(FAR, 1.0)], NEAR).address == FAR


def test_choose_without_answers_names_every_problem() -> None:
    with pytest.raises(TransportError, match=r"192\.168\.1\.5 does not answer; 10\.8\.0\.2: refuses"):
        choose([TriedAddress(NEAR), TriedAddress(FAR, error="refuses")], NEAR)
    with pytest.raises(TransportError, match="no address is known"):
        choose([])


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.none(), st.floats(1e-6, 10))),
        max_size=8,
        unique_by=lambda entry: entry[0],
    ),
    st.integers(0, 9),
)
def test_choice_is_never_much_worse_than_best(entries: list[tuple[int, float | None]], current: int) -> None:
    tried = [TriedAddress(f"192.0.2.{number}", rtt) for number, rtt in entries]
    known = {attempt.address: attempt.rtt_s for attempt in tried if attempt.rtt_s is not None}
    if not known:
        return
    choice = choose(tried, f"192.0.2.{current}")
    best = min(known.values())
    chosen = known[choice.address]
    assert chosen == best or (choice.address == f"192.0.2.{current}")
    assert chosen <= max(best / 0.8, best + 0.0002) * 1.000001
    assert all(attempt.address in choice.reason for attempt in tried)
    assert choose(tried, choice.address).address == choice.address


def test_dialable_keeps_addresses_of_one_machine() -> None:
    offered = ["127.0.1.1", "0.0.0.0", "::", "224.0.0.1", "my-mac.local", "", "127.0.0.1", "::1"]
    assert dialable(offered) == ["127.0.0.1", "::1"]
    assert dialable([*offered, "192.168.1.5", "::ffff:192.168.1.5", "fe80::1%eth0", "2001:DB8::1"]) == [
        "192.168.1.5",
        "fe80::1%eth0",
        "2001:db8::1",
    ]
    assert dialable(["::ffff:127.0.1.1"]) == []
    assert len(dialable(f"192.0.2.{number}" for number in range(100))) == MOST_ADDRESSES


def streets(test: Callable[[Machine, Machine], Coroutine[Any, Any, None]], directory: Path) -> None:
    async def perform() -> None:
        street = Street(directory)
        try:
            await test(await street.machine(), await street.machine())
        finally:
            await street.close()

    run(perform())


async def best(
    left: Machine, right: Machine, addresses: list[str], *, current: str | None = None, **more: Any
) -> tuple[ControlConnection, AddressChoice]:
    port = more.pop("port", right.listener.port)
    options = left.options(right, **more)
    link, choice = await dial_best(addresses, port, options, current=current, **left.callbacks())
    left.made.append(link)
    return link, choice


@needs_loopback_network
def test_race_keeps_one_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_race, "_GRACE_S", 60.0)  # however slow this machine is at the moment

    async def race(left: Machine, right: Machine) -> None:
        addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.1.1"]
        link, choice = await best(left, right, addresses)
        assert link.address == choice.address
        assert choice.address in addresses[:3]
        assert choice.reason.count("ms") == 3
        assert "127.0.1.1" not in choice.reason
        there = await right.links.get()
        link.send(b"hello")
        assert await right.messages.get() == (there, b"hello")
        for _ in range(2):
            assert "closed" in (await right.refusals.get()).message
        assert right.links.empty()
        assert left.ends.empty()
        assert len(right.tls.handshakes) == 0
        assert (await best(left, right, addresses, current="127.0.0.3"))[0].closed is None

    streets(race, tmp_path)


@needs_loopback_network
def test_silent_addresses_do_not_delay_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = address_race.dial_unopened

    async def race(left: Machine, right: Machine) -> None:
        with socket.create_server(("127.0.0.9", 0)) as silent:

            async def dial(address: str, port: int, options: DialOptions) -> ControlConnection:
                there = silent.getsockname()[1] if address == "127.0.0.9" else port
                return await real(address, there, options)

            monkeypatch.setattr(address_race, "dial_unopened", dial)
            began = asyncio.get_running_loop().time()
            link, choice = await best(left, right, ["127.0.0.9", "127.0.0.2"])
            assert asyncio.get_running_loop().time() - began < 30, "not the whole of the 60 s"
            assert link.address == "127.0.0.2"
            assert "127.0.0.9 does not answer" in choice.reason

    streets(race, tmp_path)


@needs_loopback_network
def test_race_chooses_nearer_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ping(link: ControlConnection, timeout_s: float) -> float:
        return {"127.0.0.2": 0.005, "127.0.0.3": 0.001, "127.0.0.4": 0.0009}[link.address]

    monkeypatch.setattr(address_race, "_GRACE_S", 60.0)  # all are measured, however slow this machine is

    async def race(left: Machine, right: Machine) -> None:
        monkeypatch.setattr(ControlConnection, "ping", ping)
        assert (await best(left, right, ["127.0.0.2", "127.0.0.3"]))[1].address == "127.0.0.3"
        candidates = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        link, choice = await best(left, right, candidates, current="127.0.0.3")
        assert (link.address, choice.address) == ("127.0.0.3", "127.0.0.3")
        assert "127.0.0.4 (0.9 ms) is not enough faster to change" in choice.reason

    streets(race, tmp_path)


@needs_loopback_network
def test_race_failures_are_told_apart(tmp_path: Path) -> None:
    async def race(left: Machine, right: Machine) -> None:
        with pytest.raises(TransportError, match="no address is known"):
            await best(left, right, ["127.0.1.1"])
        with pytest.raises(TransportError, match=r"127\.0\.0\.2:1 refuses") as caught:
            await best(left, right, ["127.0.0.2", "127.0.0.3"], port=1)
        assert was_refused(caught.value)
        with pytest.raises(HandshakeError, match="without an answer") as caught:
            await best(left, right, ["127.0.0.2", "127.0.0.3"], secret=b"w" * 32)
        assert not was_refused(caught.value)

    streets(race, tmp_path)


@needs_loopback_network
def test_cancelled_race_leaves_nothing(tmp_path: Path) -> None:
    async def race(left: Machine, right: Machine) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=10) as silent:
            port, loop = silent.getsockname()[1], asyncio.get_running_loop()
            running = asyncio.ensure_future(best(left, right, ["127.0.0.1"], port=port))
            silent.setblocking(False)
            accepted, _ = await loop.sock_accept(silent)
            with accepted:
                assert await loop.sock_recv(accepted, 1)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                while await loop.sock_recv(accepted, 1000):
                    pass

    streets(race, tmp_path)
