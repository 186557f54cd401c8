"""Joins while strangers ask without end: a machine with a usable invite is not kept out."""

from __future__ import annotations

import contextlib
from pathlib import Path

import httpx

from barnraise.hub.protocol.invites import Invite
from barnraise.hub.protocol.messages import JoinResponse, Problem, decode_message, encode_message
from barnraise.hub.storage.create import create_invite
from barnraise.identity import NodeKey
from tests.unit.hub.in_process_hub import ADDRESS, InProcessHub, play

FLOOD = 620  # more than all strangers together may send at once


async def _join(scene: InProcessHub, line: httpx.AsyncClient, key: NodeKey, invite: Invite) -> httpx.Response:
    body = encode_message(invite.request(key.id, "ann"))
    return await scene.ask(line, key, "POST /v1/members", body)


async def _flooded(scene: InProcessHub, held: contextlib.AsyncExitStack) -> httpx.AsyncClient:
    """Return a connection of an address from which strangers have used up all that strangers may send.

    The hub's clock stands still, or a slow machine would never reach the limit.
    """
    now = scene.hub.now()
    scene.hub.now = lambda: now
    line = await held.enter_async_context(scene.line("203.0.113.5"))
    others = [await held.enter_async_context(scene.again(f"198.51.100.{number}")) for number in range(8)]
    key, refused = NodeKey.generate(), 0
    for number in range(FLOOD):
        answer = await scene.ask((line, *others)[number % 9], key, "GET /v1/run")
        refused += answer.status_code == 429
    assert refused > 20, "the limit of all strangers together is reached"
    return line


def test_invited_machine_joins_while_strangers_flood(tmp_path: Path) -> None:
    """Its own address sends too much as well, as behind a proxy or in a school."""

    async def story(scene: InProcessHub) -> None:
        async with contextlib.AsyncExitStack() as held:
            line = await _flooded(scene, held)
            invite, ann = create_invite(scene.directory, ADDRESS, uses=2), NodeKey.generate()
            answer = await _join(scene, line, ann, invite)
            assert answer.status_code == 200, answer.content
            assert decode_message(JoinResponse, answer.content).role == "friend"
            assert (await _join(scene, line, ann, invite)).status_code == 200, "again, as a member"

    play(tmp_path, story)


def test_invite_reads_the_run_while_strangers_flood(tmp_path: Path) -> None:
    """The `join` command shows a person the run before it joins, so this must not fail either."""

    async def story(scene: InProcessHub) -> None:
        async with contextlib.AsyncExitStack() as held:
            line = await _flooded(scene, held)
            invite = create_invite(scene.directory, ADDRESS)
            for path in ("/v1/run", "/v1/head"):
                assert (await scene.ask(line, invite.signer, f"GET {path}")).status_code == 200
            stranger = await scene.ask(line, NodeKey.generate(), "GET /v1/run")
            assert stranger.status_code == 429

    play(tmp_path, story)


def test_invite_reads_blobs_while_strangers_hold_all_answers(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        invite = create_invite(scene.directory, ADDRESS)
        async with scene.line("203.0.113.5") as line:
            for number in range(64):
                scene.reception._unsigned.begin(f"198.51.100.{number % 4}")
            assert (await line.get("http://hub/v1/openapi.json")).status_code == 429
            assert (await scene.ask(line, invite.signer, "GET /v1/openapi.json")).status_code == 200

    play(tmp_path, story)


def test_join_without_usable_invite_counts_as_stranger(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        used = create_invite(scene.directory, ADDRESS)
        await scene.join(used)
        async with contextlib.AsyncExitStack() as held:
            line = await _flooded(scene, held)
            eve = NodeKey.generate()
            stolen = used.request(NodeKey.generate().id, "eve")  # for another machine
            for body in (encode_message(used.request(eve.id, "eve")), encode_message(stolen), b"{}", b""):
                answer = await scene.ask(line, eve, "POST /v1/members", body)
                assert answer.status_code == 429, body
                assert decode_message(Problem, answer.content).kind == "rate"

    play(tmp_path, story)


def test_long_join_is_refused(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        async with scene.line() as line:
            answer = await scene.ask(line, NodeKey.generate(), "POST /v1/members", b" " * 5000)
            assert answer.status_code == 413

    play(tmp_path, story)
