"""Description of a model and of its optimizer, as members compare them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from barnraise.training.pipeline.empty_weights import empty_weights
from barnraise.training.pipeline.members.model_facts import ModelFacts, difference
from barnraise.training.pipeline.members.task_description import describe_model, describe_optimizer
from barnraise.training.pipeline.outline import find_blocks, trace_outline
from barnraise.training.pipeline.split_training import loss_of_output
from tests.unit.training.pipeline.block_model import BLOCKS, WIDTH, BlockModel, collate, train_only

INPUTS = collate([{"ids": torch.tensor([3, 1, 4, 1, 5])}])
CPU = torch.device("cpu")


def facts(change: Any = None, **options: object) -> ModelFacts:
    """Return the facts of a model after a change."""
    with empty_weights():
        model = BlockModel()
        if change is not None:
            change(model)
    return describe_model(model, trace_outline(model, find_blocks(model), loss_of_output, INPUTS), options)


def widen(model: BlockModel) -> None:
    model.layers[2].low = nn.Linear(WIDTH, 3, bias=False)
    model.layers[2].high = nn.Linear(3, WIDTH, bias=False)


def test_facts_do_not_depend_on_the_machine() -> None:
    once = facts(seed=1)
    assert once == facts(seed=1)
    assert (once.path, once.blocks) == ("layers", BLOCKS)
    assert once.options == (("seed", "1"),)
    assert once.trained_numbers == BLOCKS * 2 * 2 * WIDTH
    assert once.numbers == sum(parameter.numel() for parameter in BlockModel().parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.layers.pop(BLOCKS - 1), "4 blocks"),
        (widen, "block 3 of its model has other parameters"),
        (lambda model: train_only(model, [1]), "it trains 48 numbers"),
        (lambda model: model.double(), "what its model has before the blocks has other parameters"),
    ],
)
def test_another_model_is_another_one_in_words(change: Any, words: str) -> None:
    assert words in difference(facts(change), facts(), "mac")


def test_optimizer_is_described_without_what_belongs_to_a_device() -> None:
    def make(**options: Any) -> dict[str, object]:
        return describe_optimizer(lambda given: torch.optim.AdamW(given, **options), None, CPU)

    known = make(lr=0.5)
    assert known["optimizer"] == "AdamW"
    assert known["optimizer's lr"] == 0.5
    assert known == make(lr=0.5, foreach=False)
    assert known != make(lr=0.5, weight_decay=0.3)
    assert describe_optimizer(torch.optim.SGD, None, CPU)["optimizer"] == "SGD"


def test_scheduler_is_described_by_its_kind() -> None:
    known = describe_optimizer(
        lambda given: torch.optim.SGD(given, lr=0.1),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        CPU,
    )
    assert known["scheduler"] == "StepLR"
