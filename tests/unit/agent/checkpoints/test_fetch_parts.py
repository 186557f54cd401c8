"""Checkpoints in parts across agents on one loop, with real disks: found, fetched and copied part by part."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection
from pathlib import Path

import pytest

from barnraise.agent.checkpoints import replicator, service
from barnraise.agent_client.run_requests import FetchCheckpointRequest
from barnraise.artifacts.store.linked_files import entry_of
from barnraise.core.errors import CheckpointError, RunError
from barnraise.core.files import remove_tree
from barnraise.runs.checkpoint_manifest import (
    CheckpointManifest,
    CheckpointPart,
    encode,
    find_checkpoints,
    fingerprint,
    part_name,
    sign,
)
from tests.unit.agent.checkpoints.test_replicator import RUN, Agent, Cluster, run

PARTS = range(4)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for answers: a slow machine would correctly be given one more copy."""
    monkeypatch.setattr(service, "_SURVEY_S", 60.0)


def content(step: int, part: int, variant: int = 0) -> bytes:
    return hashlib.shake_256(bytes([step, part, variant])).digest(20_000 + part)


def save_parts(
    agent: Agent,
    step: int,
    parts: Collection[int],
    *,
    copies: int = 2,
    generation: int = 1,
    variant: int = 0,
) -> None:
    """Save parts of a checkpoint as the workers of a machine would."""
    place = agent.place_of(step).with_name(f".draft-{generation}-{step:08}")
    place.mkdir(parents=True)
    described = []
    for number in PARTS:
        path = place / part_name(number)
        path.write_bytes(content(step, number, variant))
        described.append(CheckpointPart(number, path.stat().st_size, entry_of(path, "x").object.hex()))
        if number not in parts:
            path.unlink()
    manifest = CheckpointManifest(
        run=RUN,
        step=step,
        generation=generation,
        digest="ab" * 32,
        previous=None,
        skeleton="",
        parts=tuple(described),
        copies=copies,
    )
    data = encode(manifest)
    (place / "manifest.json").write_bytes(data)
    (place / "seal.json").write_bytes(encode(sign(agent.key, RUN, step, fingerprint(data))))
    place.rename(agent.place_of(step))


def parts_on(agent: Agent, step: int) -> set[int]:
    """Return the parts on a disk, each with the right content."""
    here = {number for number in PARTS if (agent.place_of(step) / part_name(number)).exists()}
    for number in here:
        assert (agent.place_of(step) / part_name(number)).read_bytes() == content(step, number)
    return here


async def fetch(agent: Agent, step: int, *parts: int) -> None:
    await agent.service.answer(FetchCheckpointRequest(RUN, step, 60.0, parts))


def test_newest_checkpoint_is_one_of_which_all_parts_are_in_reach(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 1))
        first, second, third, _ = cluster.agents
        save_parts(first, 40, (0, 1))
        save_parts(second, 40, (2, 3))
        save_parts(first, 50, (0, 1))  # and the second machine has died
        newest = await third.newest()
        assert (newest.step, newest.parts, set(newest.machines)) == (40, tuple(PARTS), {"h0", "h1"})
        save_parts(second, 50, (1, 2, 3))
        assert (await third.newest()).step == 50
        second.is_up = False
        assert (await first.newest()).run == ""

    run(test)


def test_machine_fetches_the_parts_that_it_needs_and_no_others(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 1))
        first, second, third, _ = cluster.agents
        save_parts(first, 40, (0, 1))
        save_parts(second, 40, (1, 2, 3))
        await fetch(third, 40, 0, 2)
        assert parts_on(third, 40) == {0, 2}
        await fetch(first, 40, 1, 3)
        assert parts_on(first, 40) == {0, 1, 3}
        await asyncio.gather(fetch(third, 40, 1), fetch(third, 40, 3), fetch(third, 40, 1, 3))
        assert parts_on(third, 40) == set(PARTS)
        assert third.holds(40)
        assert third.stored() == 0, "the store has let go of them"
        await fetch(second, 40)
        assert second.holds(40), "without numbers it is all of them, as for an export"
        assert not list(third.place_of(40).parent.glob(".*")), "no draft is left"

    run(test)


def test_damaged_part_comes_from_another_machine(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 1))
        first, second, third, _ = cluster.agents
        save_parts(first, 40, PARTS)
        save_parts(second, 40, (0, 1))
        damaged = first.place_of(40) / part_name(1)
        damaged.write_bytes(content(40, 1)[:-1] + b"!")
        await fetch(third, 40, 0, 1, 2)
        assert parts_on(third, 40) == {0, 1, 2}
        await fetch(first, 40, 1)
        assert parts_on(first, 40) == set(PARTS), "its own was damaged"
        for agent in (first, second, third):
            place = agent.place_of(40) / part_name(0)
            place.unlink()
            place.write_bytes(content(40, 0)[:-1] + b"!")
        with pytest.raises(RunError, match="cannot fetch the checkpoint of step 40"):
            await fetch(third, 40, 0)

    run(test)


def test_parts_of_another_group_are_not_mixed(tmp_path: Path) -> None:
    """A step can be saved again by a later group, after a rollback."""

    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 1))
        first, second, third, _ = cluster.agents
        save_parts(first, 40, (0, 1))
        save_parts(second, 40, PARTS, generation=2)
        assert (await third.newest()).generation == 2
        await fetch(first, 40, 0)
        signers = first.service.signers_of(RUN)
        held = {agent.me: agent.service.local.held(RUN, signers) for agent in (first, second)}
        (newest,) = find_checkpoints(held)
        assert newest.held.generation == 2
        assert newest.holders[first.me] == {0}

    run(test)


def test_step_that_a_later_group_has_saved_again_is_sent_as_it_is_now(tmp_path: Path) -> None:
    """Others may still read the older one, which has the same step and the same numbers of parts."""

    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 1))
        first, _, third, _ = cluster.agents
        save_parts(first, 40, PARTS)
        await fetch(third, 40, 0)
        remove_tree(first.place_of(40))
        save_parts(first, 40, PARTS, generation=2)
        await fetch(third, 40, 0)
        (held,) = third.service.local.held(RUN, third.service.signers_of(RUN))
        assert (held.generation, held.parts) == (2, (0,))

    run(test)


@pytest.mark.parametrize(("generation", "variant"), [(1, 0), (2, 1)])
def test_parts_of_another_group_than_was_asked_for_replace_nothing(
    tmp_path: Path, generation: int, variant: int
) -> None:
    """An older group, or one with the same number, as on both sides of a cut cable."""

    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 1))
        first, second, _, _ = cluster.agents
        save_parts(first, 40, (0, 1), generation=generation, variant=variant)
        save_parts(second, 40, PARTS, generation=2)
        signers = second.service.signers_of(RUN)
        files = first.service.local.publish(RUN, 40, signers, (0, 1)).manifest
        for entry in files.files:  # as if they had been fetched
            fetched = first.host.store.object_path(entry.object).read_bytes()
            second.host.store.put_object(entry.object, fetched)
        with pytest.raises(CheckpointError, match="another checkpoint"):
            second.service.local.keep(files, RUN, 40, signers, 2)
        assert parts_on(second, 40) == set(PARTS)

    run(test)


def test_machine_may_read_one_choice_of_parts_at_a_time(tmp_path: Path) -> None:
    """Otherwise it could let another machine lend and remember any number of choices."""

    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 1))
        first, _, third, _ = cluster.agents
        save_parts(first, 40, PARTS)
        for part in PARTS:
            await fetch(third, 40, part)
        grants = first.service.grants
        assert sum(third.me in grants.readers(manifest) for manifest in grants._grants) == 1

    run(test)


@pytest.mark.parametrize(("copies", "expected"), [(1, 1), (2, 2), (3, 3)])
def test_replicator_copies_parts_that_too_few_machines_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int, expected: int
) -> None:
    monkeypatch.setattr(replicator, "_CHECK_S", 0.02)
    monkeypatch.setattr(replicator, "_RETRY_S", 0.05)

    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 1))
        agents = cluster.agents[:3]
        for agent in cluster.agents:
            agent.spawn(agent.replicator.run())
        for step in (40, 50):
            save_parts(agents[0], step, (0, 1), copies=copies)
            await asyncio.sleep(0.1)  # the replicator sees a part of it only
            save_parts(agents[1], step, (1, 2, 3), copies=copies)
            while any(count_of(agents, step, part) < expected for part in PARTS):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        limit = max(expected, 2)
        assert all(count_of(agents, 50, part) <= limit for part in PARTS), "and no more"
        assert not parts_on(cluster.agents[3], 50), "a guest keeps nothing of others' runs"
        for agent in cluster.agents:
            for task in list(agent.tasks):
                task.cancel()

    run(test)


def count_of(agents: Collection[Agent], step: int, part: int) -> int:
    return sum((agent.place_of(step) / part_name(part)).exists() for agent in agents)
