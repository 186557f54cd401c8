"""Rounds that strangers start: no stranger moves the model far, and honest ones need no friend."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import torch

from barnraise.hub.protocol.vector_file import VectorForm, add_vector
from barnraise.hub.rounds.restore import restore_state
from barnraise.hub.storage.create import create_invite
from barnraise.hub.storage.log import HubLog
from barnraise.hub.web.status_page import render
from tests.unit.hub.hub_process import LAYOUT, TERMS, declared, encoded
from tests.unit.hub.in_process_hub import ADDRESS, InProcessHub, play


async def _stranger(scene: InProcessHub) -> str:
    return await scene.join(create_invite(scene.directory, ADDRESS, role="stranger"))


async def _push(scene: InProcessHub, node: str, size: float) -> None:
    await _push_together(scene, {node: size})


async def _push_together(scene: InProcessHub, sizes: Mapping[str, float]) -> None:
    """Push in one round, on any machine: all members get a lease before the first one delivers."""
    leases = {node: await scene.lease(node) for node in sizes}
    for node, lease in leases.items():
        data = encoded(torch.randn(LAYOUT.numel) * sizes[node], TERMS.codec, lease.version)
        await scene.send(node, declared(lease, data), data)


def _moved(scene: InProcessHub) -> float:
    """Return the distance between the last two versions."""
    step, delta = scene.hub.versions[-1].step, torch.zeros(LAYOUT.numel)
    form = VectorForm(LAYOUT.numel, TERMS.chunk, step.codec, step.version)
    add_vector(scene.hub.blobs.path(step.sha256), form, delta)
    return float(delta.norm())


async def _until_version(scene: InProcessHub, version: int) -> None:
    await asyncio.wait_for(scene.until(lambda: scene.hub.version == version), 60)


def test_update_of_region_with_strangers_is_trimmed(tmp_path: Path) -> None:
    """A stranger alone in a region is a region to the parent; its declaration says that it is a stranger."""

    async def story(scene: InProcessHub) -> None:
        region = await scene.join(create_invite(scene.directory, ADDRESS, role="region"))
        friends = [await scene.member() for _ in range(4)]
        for version, has_strangers in enumerate((False, True)):
            leases = {node: await scene.lease(node) for node in (region, *friends)}
            for node, lease in leases.items():
                data = encoded(torch.randn(LAYOUT.numel) * 0.01, TERMS.codec, lease.version)
                is_declared = has_strangers and node == region
                await scene.send(node, declared(lease, data, has_strangers=is_declared), data)
            await _until_version(scene, version + 1)
        assert [version.rule for version in scene.hub.versions[1:]] == [
            "weighted mean",
            "mean without 25% on each side",
        ]

    play(tmp_path, story)


def test_first_stranger_waits_for_update_to_compare_with(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        eve, ann = await _stranger(scene), await scene.member()
        await _push(scene, eve, 1e6)
        await asyncio.sleep(1.0)
        assert scene.hub.version == 0
        reason = (await scene.hub.head(0, 0.0)).waits_for
        assert "nothing to compare" in reason
        assert "`barnraise invite`" in reason
        assert "nothing to compare" in render(scene.hub)
        await _push(scene, ann, 0.01)
        await _until_version(scene, 1)
        assert _moved(scene) < 4 * 0.01 * LAYOUT.numel**0.5
        for round_ in range(2, 6):  # what eve sends does not become what is usual
            await _push_together(scene, {eve: 1e6, ann: 0.01})
            await _until_version(scene, round_)
        await _push(scene, eve, 1e6)
        await _until_version(scene, 6)
        assert _moved(scene) < 20 * 0.01 * LAYOUT.numel**0.5

    play(tmp_path, story)


def test_three_strangers_start_without_friend_and_two_continue(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        ann, bob, eve = [await _stranger(scene) for _ in range(3)]
        await _push(scene, ann, 0.01)
        await _push(scene, bob, 0.01)
        await asyncio.sleep(0.5)
        assert scene.hub.version == 0
        log = HubLog(scene.directory)
        kept = restore_state(log.read(), scene.hub.founding, 0.0, is_region=False)
        assert [update.of_stranger for update in kept.waiting.values()] == [True, True]
        await _push(scene, eve, 1e6)
        await _until_version(scene, 1)
        assert _moved(scene) < 4 * 0.01 * LAYOUT.numel**0.5
        assert [refusal.kind for refusal in scene.hub.refusals] == ["norm"]
        await _push(scene, ann, 0.01)
        await asyncio.sleep(0.5)
        assert scene.hub.version == 1, "two norms are not enough"
        await _push(scene, bob, 0.01)
        carol = await _stranger(scene)
        await _push(scene, carol, 0.01)
        await _until_version(scene, 2)
        await _push(scene, ann, 0.01)
        await _until_version(scene, 3)
        known = restore_state(log.read(), scene.hub.founding, 0.0, is_region=False).known
        log.close()
        assert known == scene.hub.state.known == 5, "a hub that begins again knows them"

    play(tmp_path, story)
