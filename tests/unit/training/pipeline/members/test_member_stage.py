"""State of one member of a group: its stage, its mirrors, and what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from barnraise.training.pipeline.empty_weights import empty_weights
from barnraise.training.pipeline.members.member_stage import KeptState, MemberStage, SplitTask
from barnraise.training.pipeline.members.model_facts import ModelFacts
from barnraise.training.pipeline.outline import find_blocks, trace_outline
from barnraise.training.pipeline.passes.activations import ActivationCodec
from barnraise.training.pipeline.split_training import loss_of_output, measure_parts, tokens_of
from barnraise.training.pipeline.weights import StageWeights, WeightFiles
from tests.unit.training.pipeline.block_model import BLOCKS, BlockModel, collate, write_base

INPUTS = collate([{"ids": torch.tensor([3, 1, 4, 1, 5])}])


@pytest.fixture
def held(tmp_path: Path) -> MemberStage:
    """Return a member without blocks."""
    write_base(tmp_path / "base")
    with empty_weights():
        model = BlockModel()
    outline = trace_outline(model, find_blocks(model), loss_of_output, INPUTS)
    task = SplitTask(
        model,
        outline,
        measure_parts(model, outline),
        loss_of_output,
        tokens_of,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        None,
        "1F1B",
        ActivationCodec(outline.dtype),
        ModelFacts(),
    )
    weights = StageWeights(model, WeightFiles(tmp_path / "base"), 0, torch.device("cpu"))
    return MemberStage(task, weights, KeptState())


def train(held: MemberStage) -> None:
    """Apply a step with gradients of ones, here and in the mirrors."""
    for state in (held.own, *held.mirrors.values()):
        for parameter in state.parameters.values():
            parameter.grad = torch.ones_like(parameter)
    held.apply(1.0)


def test_units_are_those_of_the_stage_of_mirrors_and_of_what_is_kept(held: MemberStage) -> None:
    held.build((1, 3), {2: (3, 4)})
    assert (held.own_units, held.other_units) == ((2, 3), (4,))
    held.kept.states = {name: {} for name in held.names_of_unit(1)}
    # Nothing is trained before and after the blocks, so anyone has all of that.
    assert held.other_units == (0, 1, 4, 6)
    assert held.shared_units((2, BLOCKS)) == [3]


def test_held_bytes_are_those_of_weights_mirrors_and_optimizers(held: MemberStage) -> None:
    assert held.held_bytes() == 0
    held.build((0, 2), {})
    weights = sum(each.nbytes for each in held._task.model.parameters() if not each.is_meta)
    assert held.held_bytes() == weights > 0
    train(held)
    trained = sum(each.nbytes for each in held.own.parameters.values())
    counts = 4 * len(held.own.parameters)  # of the steps, which Adam keeps for each parameter
    assert held.held_bytes() == weights + 2 * trained + counts
    held.build(None, {1: (0, 2)})
    assert held.held_bytes() == trained


def test_spare_has_no_stage_and_its_mirrors_train(held: MemberStage) -> None:
    held.build(None, {1: (0, 2)})
    assert held.stage is None
    assert held.own_units == ()
    assert all(parameter.is_meta for parameter in held._task.model.parameters())
    before = held.export()
    values = {name: state["value"].clone() for name, state in before.items()}
    train(held)
    assert all(not torch.equal(held.export()[name]["value"], value) for name, value in values.items())
    assert held.export_schedule()["groups"][0]["lr"] == 0.1


def test_stage_and_mirror_of_the_same_blocks_share_no_state(held: MemberStage) -> None:
    """Otherwise both would change the moments of one optimizer in each step."""
    held.build((0, 2), {})
    train(held)
    states, schedule = held.export(), held.export_schedule()
    held.build((0, 2), {1: (0, 2)})
    held.load(states, schedule)
    train(held)
    for name, parameter in held.own.parameters.items():
        mirrored = held.mirrors[1].parameters[name]
        assert torch.equal(parameter, mirrored)
        assert held.own.optimizer is not None
        assert held.mirrors[1].optimizer is not None
        own, other = held.own.optimizer.state[parameter], held.mirrors[1].optimizer.state[mirrored]
        assert torch.equal(own["exp_avg"], other["exp_avg"])
        assert own["exp_avg"].data_ptr() != other["exp_avg"].data_ptr()


def test_blocks_that_move_away_are_kept_until_they_are_released(held: MemberStage) -> None:
    held.build((0, 2), {})
    train(held)
    held.kept.states = held.export()
    held.build((2, 3), {})
    assert set(held.other_units) >= {1, 2}
    train(held)  # a commit: no member needs the old state from here on
    assert set(held.other_units).isdisjoint({1, 2})
