"""Every attack of the list on real agents in the lab: refused by its effect, and no one is disturbed.

``python -m benchmarks.attacks --list`` prints the attacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks.attacks.judging import judge
from benchmarks.attacks.registry import Attack, Scene, all_attacks
from benchmarks.attacks.scenes.group import AttackedGroup
from benchmarks.attacks.scenes.hub import AttackedHubRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

_ELSEWHERE = (AttackedGroup, AttackedHubRun)  # these need no lab
_ATTACKS = {attack.id: attack for attack in all_attacks() if attack.scene not in _ELSEWHERE}


class OpenScene:
    """The scene of the last attack; the next attack of another scene closes it."""

    def __init__(self) -> None:
        self._kind: type[Scene] | None = None
        self._scene: Scene | None = None
        self._stack = contextlib.ExitStack()

    def of(self, attack: Attack) -> Scene:
        if self._scene is None or self._kind is not attack.scene:
            self.close()
            self._scene = self._stack.enter_context(attack.scene.opened())
            self._kind = attack.scene
        return self._scene

    def close(self) -> None:
        self._scene = None
        self._stack.close()


@pytest.fixture(scope="module")
def open_scene() -> Iterator[OpenScene]:
    scene = OpenScene()
    yield scene
    scene.close()


@pytest.mark.parametrize("attack", _ATTACKS)
def test_attack_is_refused_and_disturbs_no_honest_work(open_scene: OpenScene, attack: str) -> None:
    judgement = judge(_ATTACKS[attack], open_scene.of(_ATTACKS[attack]))
    assert judgement.verdict == "refused", judgement.line()
