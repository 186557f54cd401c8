"""Run attacks one after another in their scenes, and judge each by its effect."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from benchmarks.agents.machines import NotInTimeError
from benchmarks.attacks.registry import Attack, DisturbedError, Scene

Verdict = Literal["refused", "SUCCEEDED", "DISTURBED", "NOT JUDGED"]


@dataclass(frozen=True)
class Judgement:
    """Verdict about one attack; ``words`` say how it ended."""

    attack: Attack
    verdict: Verdict
    words: str
    seconds: float

    def line(self) -> str:
        """Return the line about this attack: role, what was tried, refused or not, and how it ended."""
        attack = self.attack
        return (
            f"{self.verdict}: {attack.id}: {attack.role}: {attack.text}: {self.words} ({self.seconds:.0f} s)"
        )


def judge(attack: Attack, scene: Scene) -> Judgement:
    """Try one attack while honest work goes on in its scene."""
    begin = time.monotonic()
    verdict: Verdict = "refused"
    try:
        with _shown_errors(), scene.honest_work():
            words = attack.function(scene)
    except DisturbedError as error:
        verdict, words = "DISTURBED", _first_line(error)
    except NotInTimeError as error:  # a busy machine, or a process that hangs
        verdict, words = "NOT JUDGED", _first_line(error)
    except AssertionError as error:
        verdict, words = "SUCCEEDED", _first_line(error)
    except Exception as error:  # noqa: BLE001  # an attack that breaks shows nothing about the defence
        verdict, words = "NOT JUDGED", f"{type(error).__name__}: {_first_line(error)}"
    if verdict != "refused":
        with suppress(Exception):  # the verdict is known; the next attack shows whether this helped
            scene.restore()
    return Judgement(attack, verdict, words, time.monotonic() - begin)


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Print each error in full; the line about the attack shows its first line only."""
    try:
        yield
    except Exception:
        traceback.print_exc(file=sys.stderr)
        raise


def judge_all(attacks: Sequence[Attack]) -> Iterator[Judgement]:
    """Judge the attacks scene by scene; a scene that does not open leaves its attacks not judged."""
    for scene_type, group in groupby(attacks, key=lambda attack: attack.scene):
        with ExitStack() as stack:
            try:
                scene = stack.enter_context(scene_type.opened())
            except Exception as error:  # noqa: BLE001  # the other scenes are judged all the same
                traceback.print_exc(file=sys.stderr)
                words = f"the scene does not open: {_first_line(error)}"
                yield from (Judgement(attack, "NOT JUDGED", words, 0.0) for attack in group)
                continue
            for attack in group:
                yield judge(attack, scene)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def figures(judgements: Sequence[Judgement]) -> dict[str, int]:
    """Return the counts that the last line shows."""
    count = [judgement.verdict for judgement in judgements].count
    return {
        "attacks": len(judgements),
        "succeeded": count("SUCCEEDED"),
        "honest_work_disturbed": count("DISTURBED"),
        "not_judged": count("NOT JUDGED"),
    }
