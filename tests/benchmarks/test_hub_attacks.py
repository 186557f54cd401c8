"""Every attack on a hub: refused by its effect, while the hub's friends train on. It needs no lab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.attacks.judging import judge
from benchmarks.attacks.registry import all_attacks
from benchmarks.attacks.scenes.hub import AttackedHubRun

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(480)]

_ATTACKS = {attack.id: attack for attack in all_attacks() if attack.scene is AttackedHubRun}


@pytest.fixture(scope="module")
def attacked_hub() -> Iterator[AttackedHubRun]:
    with AttackedHubRun.opened() as scene:
        yield scene


@pytest.mark.parametrize("attack", _ATTACKS)
def test_attack_on_hub_is_refused_and_friends_train_on(attacked_hub: AttackedHubRun, attack: str) -> None:
    judgement = judge(_ATTACKS[attack], attacked_hub)
    assert judgement.verdict == "refused", judgement.line()
