"""Summary of losses: machines that died and came back, and dropped steps."""

from __future__ import annotations

import msgspec

from barnraise.display.losses import loss_summary
from barnraise.history.view import EventView, MachineView, RunView
from barnraise.history.view_builder import build_view
from tests.unit.history.example_run import RUN, STEPS, example_run

VIEW = build_view(example_run(), run=RUN)
EMPTY = msgspec.structs.replace(VIEW, events=())


def _event(at: float, kind: str, node: str = "aa", step: int | None = None, text: str = "") -> EventView:
    fields = {"at": at, "kind": kind, "node": node, "step": step, "text": text}
    return msgspec.convert(fields, EventView)


def _run(*events: EventView, rolled_back: int = 0) -> RunView:
    machines = (MachineView(node="aa", name="nas", state="trains"),)
    return msgspec.structs.replace(VIEW, machines=machines, events=events, rolled_back=rolled_back)


def test_run_without_a_loss_has_no_summary() -> None:
    assert loss_summary(build_view(example_run(300), run=RUN)) == ""
    assert loss_summary(EMPTY) == ""


def test_loss_and_return_are_one_sentence() -> None:
    assert (
        loss_summary(VIEW) == "mac died at step 320 and came back at step 410. No step that counts was lost."
    )


def test_loss_without_a_return_says_whether_the_run_goes_on() -> None:
    running = build_view(example_run(350), run=RUN)
    assert loss_summary(running).startswith("mac died at step 320 and has not come back.")
    ended = _run(_event(1, "died", step=STEPS))
    assert loss_summary(ended) == "nas died at step 600 and did not come back. No step that counts was lost."


def test_failure_is_named_only_where_no_machine_was_lost() -> None:
    failure = _event(10, "failure", text="a worker on nas failed: it exited with code 1")
    restarted = _run(failure, rolled_back=12)
    assert loss_summary(restarted) == (
        "A worker on nas failed: it exited with code 1. "
        "Training went back to an earlier step and dropped 12 steps."
    )
    assert "worker" not in loss_summary(_run(failure, _event(11, "died", step=4), _event(90, "recovered")))


def test_many_losses_are_counted() -> None:
    events = [_event(at, kind) for at in range(0, 100, 10) for kind in ("died", "recovered")]
    assert loss_summary(_run(*events[:-1])).startswith("Machines were lost 10 times and came back 9 times.")
