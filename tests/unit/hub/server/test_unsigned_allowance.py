"""Clients without a member's signature: their requests and bytes are limited, and members' are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Message

from barnraise.hub.protocol.messages import Problem, decode_message
from barnraise.hub.server.app import HubApp, make_app
from barnraise.hub.server.unsigned_allowance import UnsignedAllowance, UnsignedLimits
from barnraise.hub.storage.create import hub_key
from barnraise.identity import NodeKey
from tests.unit.hub.in_process_hub import InProcessHub, play

RATE = 4e6  # bytes/s
SIZE = 3 << 20


def test_requests_are_limited_per_source_and_in_total() -> None:
    allowance = UnsignedAllowance(RATE, lambda: 0.0)
    assert [allowance.take_request("a") for _ in range(101)].count(0.0) == 100
    assert allowance.take_request("b") == 0.0, "another source is not concerned"
    many = [allowance.take_request(f"s{number}") for number in range(600)]
    assert many.count(0.0) == 500 - 101
    assert allowance.take_request("") > 0, "this machine, and a proxy on it, count in total"


def test_source_without_address_has_no_limit_of_its_own() -> None:
    allowance = UnsignedAllowance(RATE, lambda: 0.0)
    assert [allowance.take_request("") for _ in range(501)].count(0.0) == 500


async def _sent(response: Response, receive: Callable[[], Awaitable[Message]]) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await response({"type": "http", "method": "GET", "headers": []}, receive, send)
    return messages


async def _connected() -> Message:
    await asyncio.sleep(600)
    return {"type": "http.disconnect"}


def test_large_answer_takes_as_long_as_rate_says() -> None:
    async def story() -> None:
        allowance = UnsignedAllowance(RATE, time.monotonic)
        body, began = bytes(range(256)) * (SIZE // 256), time.monotonic()
        messages = await _sent(allowance.slowed(Response(body), ""), _connected)
        assert b"".join(message.get("body", b"") for message in messages) == body
        assert messages[-1]["more_body"] is False
        assert time.monotonic() - began > 0.9 * (SIZE - (1 << 20)) / RATE

    asyncio.run(story())


def test_answer_to_disconnected_client_takes_no_bytes() -> None:
    """Clients that ask for a large file and leave again would use up what the others may have."""

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def story() -> None:
        allowance = UnsignedAllowance(1e5, time.monotonic)
        for _ in range(100):
            await _sent(allowance.slowed(Response(bytes(SIZE)), "eve"), gone)
        began = time.monotonic()
        await _sent(allowance.slowed(Response(bytes(1 << 15)), "ann"), _connected)
        assert time.monotonic() - began < 5.0
        assert allowance.take_request("eve") == 0.0, "none of them is open any more"

    asyncio.run(story())


def test_number_of_open_answers_is_bounded() -> None:
    allowance = UnsignedAllowance(RATE, lambda: 0.0)
    for _ in range(16):
        allowance.begin("eve")
    assert allowance.take_request("eve") > 0
    assert allowance.take_request("ann") == 0.0
    for number in range(48):
        allowance.begin(f"s{number}")
    assert allowance.take_request("ann") > 0
    allowance.end("eve")
    assert allowance.take_request("ann") == 0.0


def _app(scene: InProcessHub, limits: UnsignedLimits) -> HubApp:
    return HubApp(scene.hub, scene.intake, hub_key(scene.directory), limits=limits)


def _line(reception: HubApp, address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(reception), client=(address, 1)))


PATHS = ("/v1/run", "/v1/head", "/", "/metrics", "/v1/openapi.json", f"/v1/blobs/{'0' * 64}")


@pytest.mark.parametrize("path", PATHS)
def test_unsigned_requests_are_rejected_beyond_limit(tmp_path: Path, path: str) -> None:
    async def story(scene: InProcessHub) -> None:
        reception = _app(scene, UnsignedLimits(bytes_s=0.0))
        async with _line(reception, "203.0.113.5") as eve, _line(reception, "203.0.113.6") as bob:
            answers = [await eve.get(f"http://hub{path}") for _ in range(150)]
            statuses = [answer.status_code for answer in answers]
            assert 100 <= len([status for status in statuses if status != 429]) < 130
            assert decode_message(Problem, answers[statuses.index(429)].content).kind == "rate"
            assert (await bob.get(f"http://hub{path}")).status_code in (200, 404)
            ann = await scene.member()
            signed = await scene.ask(eve, scene.keys[ann], f"GET {path}")
            assert signed.status_code in (200, 404), "a member at the same address"

    play(tmp_path, story)


def test_member_downloads_at_full_speed_while_others_are_slowed(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        name = scene.hub.blobs.put(bytes(SIZE))
        reception = _app(scene, UnsignedLimits(bytes_s=1e5))
        ann, path = await scene.member(), f"/v1/blobs/{name}"
        async with _line(reception, "203.0.113.5") as line:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(line.get(f"http://hub{path}"), 0.5)
            answer = await asyncio.wait_for(scene.ask(line, scene.keys[ann], f"GET {path}"), 60.0)
            assert len(answer.content) == SIZE
            with pytest.raises(TimeoutError):  # a key that is no member's
                await asyncio.wait_for(scene.ask(line, NodeKey.generate(), f"GET {path}"), 0.5)
            await scene.hub.expel(ann)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scene.ask(line, scene.keys[ann], f"GET {path}"), 0.5)

    play(tmp_path, story)


@pytest.mark.parametrize("forwarded", [False, True])
def test_address_named_by_proxy_counts_only_if_believed(tmp_path: Path, forwarded: bool) -> None:
    async def story(scene: InProcessHub) -> None:
        reception = _app(scene, UnsignedLimits(forwarded=forwarded))

        async def counted(address: str, named: str) -> int:
            async with _line(reception, address) as line:
                headers = {"x-forwarded-for": named}
                answers = [await line.get("http://hub/v1/run", headers=headers) for _ in range(130)]
            return [answer.status_code for answer in answers].count(200)

        by_proxy = await counted("127.0.0.1", "198.51.100.1, 203.0.113.5")
        assert (by_proxy < 130) == forwarded
        again = await counted("127.0.0.1", "198.51.100.2, 203.0.113.5")
        assert (again < 50) == forwarded, "the client itself wrote the first one"
        assert await counted("127.0.0.1", "203.0.113.9") >= 100
        assert 100 <= await counted("203.0.113.77", "192.0.2.1") < 130, "only a proxy on this machine"

    play(tmp_path, story)
