"""The list of attacks is whole, and each verdict follows from the effect of an attack."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Self

import pytest

from benchmarks.agents.machines import NotInTimeError
from benchmarks.attacks import __main__ as command
from benchmarks.attacks.judging import figures, judge, judge_all
from benchmarks.attacks.registry import Attack, DisturbedError, all_attacks, attack, undisturbed
from benchmarks.attacks.tools.__main__ import TOOLS
from tests.repository import ROOT


class CalmScene:
    """A scene without processes; it counts restorations."""

    disturbance = ""

    def __init__(self) -> None:
        self.restored = 0

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Self]:
        yield cls()

    @contextlib.contextmanager
    def honest_work(self) -> Iterator[None]:
        yield
        undisturbed(not self.disturbance, self.disturbance)

    def restore(self) -> None:
        self.restored += 1


class BusyScene(CalmScene):
    """A scene whose honest work does not go on."""

    disturbance = "a worker paused"


class ClosedScene(CalmScene):
    """A scene that does not open."""

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Self]:
        raise OSError("no namespaces")
        yield


def _made(function: Callable[[CalmScene], str], scene: type[CalmScene] = CalmScene) -> Attack:
    return Attack("a-b", "guest", "tries it", scene, "quick", function)


def _failing(error: Exception) -> Callable[[CalmScene], str]:
    def function(scene: CalmScene) -> str:
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        (lambda scene: "its link was cut", "refused"),
        (_failing(AssertionError("it is an owner now")), "SUCCEEDED"),
        (_failing(DisturbedError("a worker paused")), "DISTURBED"),
        (_failing(NotInTimeError("waited 30 s")), "NOT JUDGED"),
        (_failing(KeyError("x")), "NOT JUDGED"),
    ],
)
def test_judge_tells_verdict_from_how_the_function_ends(
    function: Callable[[CalmScene], str], verdict: str
) -> None:
    scene = CalmScene()
    assert judge(_made(function), scene).verdict == verdict
    assert scene.restored == (verdict != "refused")


def test_judge_finds_disturbed_work_although_attack_was_refused() -> None:
    judgement = judge(_made(lambda scene: "its link was cut", BusyScene), BusyScene())
    assert (judgement.verdict, judgement.words) == ("DISTURBED", "a worker paused")


def test_judge_all_counts_attacks_of_closed_scene_as_not_judged() -> None:
    attacks = [_made(lambda scene: "cut"), _made(lambda scene: "cut", ClosedScene)]
    judgements = list(judge_all(attacks))
    assert [judgement.verdict for judgement in judgements] == ["refused", "NOT JUDGED"]
    assert figures(judgements) == {
        "attacks": 2,
        "succeeded": 0,
        "honest_work_disturbed": 0,
        "not_judged": 1,
    }


@pytest.mark.parametrize(("error", "code"), [(None, 0), (AssertionError("in"), 1), (KeyError("x"), 1)])
def test_command_prints_line_per_attack_and_figures(
    error: Exception | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = _made(_failing(error) if error else lambda scene: "its link was cut")
    monkeypatch.setattr(command, "all_attacks", lambda: [tried])
    monkeypatch.setattr(command, "why_unavailable", lambda: None)
    assert command.main(["--quick"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert "a-b: guest: tries it: " in lines[-2]
    assert json.loads(lines[-1])["attacks"] == 1


def test_command_leaves_out_long_attacks_only_with_quick() -> None:
    quick, long = _made(lambda scene: ""), Attack("c-d", "guest", "t", CalmScene, "full", lambda scene: "")
    assert command.selected([quick, long], quick=True, only=[]) == [quick]
    assert command.selected([quick, long], quick=False, only=[]) == [quick, long]
    assert command.selected([quick, long], quick=True, only=["c-d"]) == [long]
    with pytest.raises(SystemExit, match="no attack e-f"):
        command.selected([quick], quick=True, only=["e-f"])


@pytest.mark.parametrize("id", ["guest-decides", "spaces are not allowed", "word"])
def test_attack_with_taken_or_malformed_id_is_rejected(id: str) -> None:
    all_attacks()
    with pytest.raises(ValueError, match="is taken"):
        attack(id, "guest", "tries it", CalmScene)


def test_quick_attacks_are_at_least_sixty() -> None:
    assert len([listed for listed in all_attacks() if listed.tier == "quick"]) >= 60


def test_scenes_stay_together_in_the_list() -> None:
    scenes = [listed.scene for listed in all_attacks()]
    changes = [second for first, second in itertools.pairwise(scenes) if first is not second]
    assert len(changes) == len(set(scenes)) - 1


def test_tools_named_in_the_catalog_exist() -> None:
    named = {
        name
        for file in (ROOT / "benchmarks" / "attacks" / "catalog").rglob("*.py")
        for name in re.findall(
            r"\b(?:attack|start)\(\s*(?:cluster\.\w+,\s*)?\"(\w+)\"", file.read_text("utf-8")
        )
    }
    assert len(named) > 20
    assert named - set(TOOLS) == set()
