"""Signatures of a run's chain: a region cannot give its members another model than the run's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from barnraise.core.errors import HubError
from barnraise.hub.client.client import HubClient
from barnraise.hub.client.contributor import Contributor
from barnraise.hub.protocol.chain import check_chain, sign_step
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    VectorEntry,
    VectorLayout,
    VersionHead,
    VersionStep,
    decode_message,
)
from barnraise.hub.storage.create import hub_key
from barnraise.identity import NodeKey
from tests.unit.hub.client.fake_hub import FakeHub
from tests.unit.hub.in_process_hub import InProcessHub, play

ROOT = NodeKey.generate()
BASE = VersionStep("base", 3, "a" * 64, 100, "fp32")
DELTAS = [VersionStep("delta", version, "b" * 64, 10, "int8") for version in (4, 5)]


def _signed(*steps: VersionStep) -> list[VersionStep]:
    return [sign_step(ROOT, step) for step in steps]


def test_signed_chain_is_accepted() -> None:
    check_chain(_signed(BASE, *DELTAS), None, ROOT.id)
    check_chain(_signed(BASE, *DELTAS), 1, ROOT.id)
    check_chain(_signed(*DELTAS), 3, ROOT.id)
    check_chain([], 5, ROOT.id)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "delta", "version": 4},
        {"version": 4},
        {"sha256": "c" * 64},
        {"size": 101},
        {"codec": "int8"},
        {"signature": ""},
        {"signature": "A" * 86},
    ],
    ids=str,
)
def test_changed_step_is_rejected(change: dict[str, object]) -> None:
    (step,) = _signed(BASE)
    with pytest.raises(HubError, match="did not sign version"):
        check_chain([msgspec.structs.replace(step, **change)], None, ROOT.id)


def test_step_signed_by_another_key_is_rejected() -> None:
    """The region signs its own model, or names a step of another run."""
    with pytest.raises(HubError, match="did not sign version 3"):
        check_chain([sign_step(NodeKey.generate(), BASE)], None, ROOT.id)


@pytest.mark.parametrize(
    ("steps", "after"),
    [
        (DELTAS[1:], 3),
        (DELTAS, 4),
        (DELTAS, None),
        ((BASE, DELTAS[1]), None),
        ((BASE, *DELTAS, DELTAS[1]), None),
    ],
)
def test_chain_with_missing_or_repeated_step_is_rejected(
    steps: tuple[VersionStep, ...], after: int | None
) -> None:
    with pytest.raises(HubError, match="leaves out a version"):
        check_chain(_signed(*steps), after, ROOT.id)


def test_chain_that_goes_back_is_rejected() -> None:
    with pytest.raises(HubError, match="goes back from version 4"):
        check_chain(_signed(BASE), 4, ROOT.id)


LAYOUT = VectorLayout((VectorEntry("weight", (50, 60), "float32"),))
COURSE = HubDataOrder(samples=100, batch=8)


class Region(FakeHub):
    """Region that signs its steps with the key of the run's hub, or with its own."""

    def __init__(self, room: Path, signer: NodeKey | None) -> None:
        super().__init__(room)
        self._signer = signer

    def _head(self, after: str | None) -> VersionHead:
        head = super()._head(after)
        steps = [sign_step(self._signer or self.key, step) for step in head.steps]
        return msgspec.structs.replace(head, steps=tuple(steps))


@pytest.mark.parametrize("is_honest", [True, False])
def test_member_of_region_trains_only_the_runs_model(tmp_path: Path, is_honest: bool) -> None:
    """A region answers with its own key, and has another model than the run's hub."""
    region = Region(tmp_path, ROOT if is_honest else None)

    def member(root: NodeKey | None, *, is_owner: bool = False) -> Contributor:
        client = HubClient(
            ["http://region.test"],
            region.key.id,
            NodeKey.generate(),
            root=None if root is None else root.id,
            transport=region.transport,
        )
        return Contributor(client, tmp_path, is_owner=is_owner, metered=lambda: False)

    member(None, is_owner=True).start(LAYOUT, COURSE, torch.ones(LAYOUT.numel))
    state = torch.zeros(LAYOUT.numel)
    if is_honest:
        assert member(ROOT).start(LAYOUT, COURSE, state) is not None
        assert bool((state == 1).all())
        return
    with pytest.raises(HubError, match="the run's hub did not sign version 0"):
        member(ROOT).start(LAYOUT, COURSE, state)
    assert not state.any(), "nothing of it reached the model"


def test_hub_signs_its_chain(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        ann, key = await scene.member(), hub_key(scene.directory)
        await scene.round(ann)
        async with scene.line() as line:
            for query, after in (("", None), ("?after=0", 0)):
                answer = await scene.ask(line, scene.keys[ann], f"GET /v1/head{query}")
                head = decode_message(VersionHead, answer.content)
                assert head.steps[-1].version == 1
                check_chain(head.steps, after, key.id)
            scene.hub.is_region = True
            answer = await scene.ask(line, scene.keys[ann], "GET /v1/head")
            steps = decode_message(VersionHead, answer.content).steps
            assert {step.signature for step in steps} == {""}, "a region has only what its parent signed"

    play(tmp_path, story)
