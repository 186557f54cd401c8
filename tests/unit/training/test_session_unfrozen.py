"""Parameters that the script unfreezes while it trains: all workers train them from the same commit on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from barnraise.checkpoint.serialization import FlatState, byte_view
from barnraise.core.errors import RunError
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.recovery.live_recovery import CommittedStep
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import Sync
from tests.unit.training.adapted_model import Tuning, assert_equal_models
from tests.unit.training.steps.test_recovery_failures import HalfHeard
from tests.unit.training.threaded_group import ThreadWorker, run_workers

NAME = "2.base.weight"


@pytest.fixture(autouse=True)
def _equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Throughput, "speed", lambda self: 1.0)


def _unfreeze(tuning: Tuning, *, again: bool = False) -> None:
    for number in (2, 4):
        tuning.net[number].base.requires_grad_(not again)  # type: ignore[union-attr,operator]


def _at(step: int) -> Any:
    return lambda tuning: _unfreeze(tuning) if tuning.run.step == step else None


def _train_outside(parameter: torch.nn.Parameter) -> None:
    parameter.requires_grad_(True)


def _copy(parts: FlatState) -> FlatState:
    return FlatState(parts.skeleton, [tensor.clone() for tensor in parts.tensors])


def _replayed(result: CommittedStep) -> CommittedStep:
    return msgspec.structs.replace(result, tensors=[byte_view(tensor) for tensor in result.tensors])


def test_unfrozen_parameters_move_from_step_after_next_on() -> None:
    seen: list[torch.Tensor] = []

    def look(tuning: Tuning) -> None:
        seen.append(tuning.net.state_dict()[NAME].clone())
        _at(2)(tuning)

    tuning = Tuning(SingleWorkerManager(), everything=True).train(5, look)
    assert torch.equal(seen[1], seen[2]), "the workers agree with the third step"
    assert not torch.equal(seen[2], seen[3])
    assert tuning.state.base.moved == {
        f"{number}.base.{kind}" for number in (2, 4) for kind in ("weight", "bias")
    }


def test_workers_train_unfrozen_parameters_as_one_machine() -> None:
    alone = Tuning(SingleWorkerManager(), everything=True).train(6, _at(2))
    members = run_workers(3, lambda worker: Tuning(worker, everything=True).train(6, _at(2)))
    for member in members:
        assert_equal_models(member.net, members[0].net)
        assert NAME not in member.state.base.names
    for name, tensor in members[0].net.state_dict().items():
        torch.testing.assert_close(tensor, alone.net.state_dict()[name], rtol=0, atol=1e-9)


def test_parameters_that_one_worker_unfreezes_are_trained_by_all() -> None:
    """As when a worker joins just after the others' scripts have unfrozen them."""

    def member(worker: ThreadWorker) -> Tuning:
        return Tuning(worker, everything=True).train(5, _at(2 if worker.rank else 99))

    first, second = run_workers(2, member)
    assert_equal_models(first.net, second.net)
    assert first.net[2].base.weight.requires_grad  # type: ignore[union-attr]
    assert first.run.state_digest() == second.run.state_digest()


def test_votes_heard_by_some_unfreeze_on_all() -> None:
    """The group fails while the workers agree; a worker without the votes follows the step's result."""

    def member(worker: ThreadWorker) -> Tuning:
        tuning = Tuning(HalfHeard(worker._exchange, worker.rank), everything=True)
        return tuning.train(9, _at(4))

    members = run_workers(3, member)
    assert members[1].run._manager.met > 1  # type: ignore[attr-defined]
    for other in members:
        assert_equal_models(members[0].net, other.net)
        assert NAME in other.state.base.moved
    alone = Tuning(SingleWorkerManager(), everything=True).train(9, _at(4))
    for name, tensor in members[0].net.state_dict().items():
        torch.testing.assert_close(tensor, alone.net.state_dict()[name], rtol=0, atol=1e-9)


def test_replay_over_unfreezing_holds_same_state() -> None:
    half = Tuning(SingleWorkerManager(), everything=True)
    results: list[CommittedStep] = []
    half.run._step_loop._recovery.note_commit = lambda result: results.append(result())  # type: ignore[method-assign]
    half.train_flat(2)
    snapshot = _copy(half.state.flatten(2))
    _unfreeze(half)
    half.train_flat(4)
    late = Tuning(SingleWorkerManager(), everything=True)
    late.run._step_loop._load_state(snapshot)
    for result in results[2:]:
        late.run._step_loop._replay(_replayed(result))
    assert late.state.fingerprint(4, is_full=True) == half.state.fingerprint(4, is_full=True)
    late.run._step_loop._start_next_step()
    assert_equal_models(late.train_flat(6).net, half.train_flat(6).net)


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_state_from_after_unfreezing_is_continued(is_checkpoint: bool) -> None:
    """By a worker that joins, and by a run that resumes; scripts may unfreeze at one step only."""
    half = Tuning(SingleWorkerManager(), everything=True).train_flat(2)
    _unfreeze(half)
    half.train_flat(4)
    parts = _copy(half.state.flatten(4))
    late = Tuning(SingleWorkerManager(), everything=True)
    assert sum(tensor.numel() * tensor.element_size() for tensor in parts.tensors) < late.state.max_bytes
    late.run._step_loop.done = late.state.load(parts, "pc", is_checkpoint=is_checkpoint)
    late.run._step_loop._start_next_step()
    assert late.state.fingerprint(4, is_full=True) == half.state.fingerprint(4, is_full=True)
    assert_equal_models(late.train_flat(6).net, half.train_flat(6).net)


def test_parameters_frozen_again_stay_state_and_are_frozen_on_joining_worker() -> None:
    half = Tuning(SingleWorkerManager(), everything=True).train_flat(1)
    _unfreeze(half)
    half.train_flat(3)
    _unfreeze(half, again=True)
    half.train_flat(4)
    before = half.weights()[NAME]
    late = Tuning(SingleWorkerManager(), everything=True)
    late.run._step_loop.done = late.state.load(_copy(half.state.flatten(4)), "pc")
    late.run._step_loop._start_next_step()
    assert not late.net[2].base.weight.requires_grad  # type: ignore[union-attr]
    assert_equal_models(late.train_flat(6).net, half.train_flat(6).net)
    assert torch.equal(half.weights()[NAME], before)


def test_unfreezing_in_rounds_is_rejected() -> None:
    def member(worker: ThreadWorker) -> Tuning:
        return Tuning(worker, everything=True, sync=Sync(period=2, momentum=0.0)).train(12, _at(4))

    with pytest.raises(RunError, match=r"2\.base\.weight was unfrozen after prepare"):
        run_workers(2, member)


def test_unfrozen_parameter_outside_of_model_is_rejected() -> None:
    """It would be trained, and lost."""
    outside = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    tuning = Tuning(SingleWorkerManager(), everything=True, outside=outside)
    with pytest.raises(RunError, match=r"of shape \(3,\) is not in the model's state"):
        tuning.train(4, lambda _: _train_outside(outside))
