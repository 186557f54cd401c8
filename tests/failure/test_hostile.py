"""Attacks on a worker's port while a group is at work: no process crashes or grows, and the group goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.attacks.judging import judge
from benchmarks.attacks.registry import all_attacks
from benchmarks.attacks.scenes.group import AttackedGroup
from tests.failure.worker_pool import WorkerPool

_ATTACKS = {attack.id: attack for attack in all_attacks() if attack.scene is AttackedGroup}


@pytest.fixture(scope="module")
def attacked_group(worker_pool: WorkerPool) -> Iterator[AttackedGroup]:
    group = AttackedGroup.formed(worker_pool)
    yield group
    group.close()


@pytest.mark.parametrize("attack", _ATTACKS)
def test_attack_on_worker_is_refused_and_group_goes_on(attacked_group: AttackedGroup, attack: str) -> None:
    judgement = judge(_ATTACKS[attack], attacked_group)
    assert judgement.verdict == "refused", judgement.line()
