"""Stages of a model in one process: the outline, the weights, and equality with the whole model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from barnraise.core.errors import RunError
from barnraise.training.data.loader import seed_all
from barnraise.training.pipeline.empty_weights import empty_weights
from barnraise.training.pipeline.outline import ModelOutline, find_blocks, trace_outline
from barnraise.training.pipeline.passes.schedule import MicroBatchWork, run_alone
from barnraise.training.pipeline.split_training import loss_of_output, measure_parts, tokens_of
from barnraise.training.pipeline.stage import Stage
from barnraise.training.pipeline.weights import StageWeights, WeightFiles
from tests.unit.training.pipeline.block_model import (
    BLOCKS,
    WIDTH,
    Block,
    BlockModel,
    Output,
    collate,
    write_base,
)

INPUTS = collate([{"ids": torch.tensor([3, 1, 4, 1, 5])}, {"ids": torch.tensor([9, 2, 6])}])


def empty_model() -> BlockModel:
    with empty_weights():
        return BlockModel()


def outline_of(model: nn.Module, inputs: Any = INPUTS) -> ModelOutline:
    return trace_outline(model, find_blocks(model), loss_of_output, inputs)


def load_stage(folder: Path, first: int, end: int) -> tuple[BlockModel, Stage]:
    model = empty_model()
    outline = outline_of(model)
    StageWeights(model, WeightFiles(folder), 0, torch.device("cpu")).load(outline.names(first, end))
    return model, Stage(model, outline, first, end, loss_of_output)


def seed(number: int, block: int) -> None:
    seed_all(100 * number + block + 1)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_base(tmp_path / "base")
    return tmp_path / "base"


def test_empty_model_has_no_memory_but_its_buffers() -> None:
    model = empty_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.scale.tolist() == torch.linspace(0.5, 1.5, WIDTH).tolist()
    assert not model.embed.weight.requires_grad
    assert not nn.Linear(2, 2).weight.is_meta, "only in the context"


def test_outline_names_each_parameter_where_it_is_used() -> None:
    outline = outline_of(empty_model())
    assert outline.before == {"embed.weight"}
    assert outline.after == {"head.weight", "head.bias"}
    assert outline.path == "layers"
    assert outline.embeddings == ("embed",)
    assert len(outline.blocks) == BLOCKS
    assert all(name.startswith("layers.2.") for name in outline.blocks[2])
    assert outline.shape == (2, 5, WIDTH)


@pytest.mark.parametrize("cuts", [(0, BLOCKS), (0, 2, BLOCKS), (0, 1, 4, BLOCKS)])
def test_stages_equal_the_whole_model(base: Path, cuts: tuple[int, ...]) -> None:
    whole, everything = load_stage(base, 0, BLOCKS)
    work = MicroBatchWork(0, INPUTS, 1.0, (2, 5, WIDTH))
    expected = run_alone(everything, [work], seed)
    stages = [load_stage(base, first, end) for first, end in pairwise(cuts)]
    passes: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    received = None
    for _, stage in stages:
        stage.seed = lambda block: seed(0, block)
        result = stage(received, INPUTS)
        passes.append((received, result))
        received = result.detach().requires_grad_()
    assert passes[-1][1].item() == expected
    gradient = None
    for own, result in reversed(passes):
        torch.autograd.backward(result, gradient)
        gradient = own.grad if own is not None else None
    gradients = {
        name: parameter.grad
        for model, _ in stages
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert torch.equal(gradients[name], parameter.grad), name


def test_stage_has_memory_only_for_its_own_weights(base: Path) -> None:
    model, stage = load_stage(base, 2, 4)
    held = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert {name.split(".")[1] for name in held} == {"2", "3"}
    assert stage.shape_of(INPUTS) == (2, 5, WIDTH)
    stage.undo()
    assert all(type(block).__name__ == "Block" for block in model.layers)
    assert type(model.embed) is nn.Embedding


def test_trained_weights_start_alike_in_every_split(base: Path) -> None:
    whole, _ = load_stage(base, 0, BLOCKS)
    part, _ = load_stage(base, 1, 3)
    assert torch.equal(whole.layers[2].low.weight, part.layers[2].low.weight)
    assert not torch.equal(whole.layers[1].low.weight, whole.layers[2].low.weight)
    original = write_base(base.parent / "again")
    assert torch.equal(whole.layers[2].base.weight, original.layers[2].base.weight)


def test_dropped_weights_are_read_again(base: Path) -> None:
    model = empty_model()
    outline = outline_of(model)
    weights = StageWeights(model, WeightFiles(base), 0, torch.device("cpu"))
    weights.load(outline.names(0, 2))
    before = model.layers[0].base.weight.clone()
    weights.drop_all_but(outline.names(1, 2))
    assert model.layers[0].base.weight.is_meta
    assert not model.layers[1].base.weight.is_meta
    weights.load(outline.names(0, 2))
    assert torch.equal(model.layers[0].base.weight, before)


def test_frozen_weight_that_no_file_has_is_refused(base: Path) -> None:
    (base / "model-1.safetensors").unlink()
    with pytest.raises(RunError, match=r"files lack .* which is not trained"):
        load_stage(base, 0, BLOCKS)


def test_other_shape_is_refused(base: Path) -> None:
    model = empty_model()
    with empty_weights():
        model.head = nn.Linear(WIDTH, 3).requires_grad_(False)
    weights = StageWeights(model, WeightFiles(base), 0, torch.device("cpu"))
    with pytest.raises(RunError, match=r"head.* has the shape .* and in the model"):
        weights.load(["head.weight", "head.bias"])


def test_buffers_are_read_on_every_machine(base: Path) -> None:
    scale = torch.arange(float(WIDTH))
    save_file({"scale": scale, "shift": scale.clone()}, base / "buffers.safetensors")
    model = empty_model()
    model.register_buffer("shift", torch.zeros(WIDTH))
    StageWeights(model, WeightFiles(base), 0, torch.device("cpu")).load_buffers()
    assert torch.equal(model.get_buffer("shift"), scale)
    assert not torch.equal(model.scale, scale), "computed by the model, and not part of its files"


def test_tied_weight_is_found_under_either_name(base: Path) -> None:
    model = empty_model()
    model.head.weight = model.embed.weight
    whole = write_base(base.parent / "again")
    for path in base.glob("*"):
        path.unlink()
    save_file({"head.weight": whole.head.weight.detach()}, base / "model.safetensors")
    StageWeights(model, WeightFiles(base), 0, torch.device("cpu")).load(["embed.weight"])
    assert torch.equal(model.embed.weight, whole.head.weight)
    assert model.head.weight is model.embed.weight


def test_folders_without_readable_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no weights in"):
        WeightFiles(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(RunError, match=r"model\.safetensors cannot be read") as caught:
        WeightFiles(tmp_path)
    assert caught.value.hint == "Download this file again."


class _Shortcut(BlockModel):
    """The head also sees the embeddings."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Output:
        start = self.embed(ids)
        hidden = start
        for layer in self.layers:
            hidden = layer(hidden, mask=torch.ones(1))
        return Output(self.head(hidden + start).sum())


class _SecondPath(BlockModel):
    """Each block gets the embeddings in addition."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = start = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, mask=start)
        return Output(self.head(hidden).sum())


class _Backwards(BlockModel):
    """The blocks are called in another order."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = self.embed(ids)
        for layer in reversed(self.layers):
            hidden = layer(hidden, mask=torch.ones(1))
        return Output(self.head(hidden).sum())


class _Between(BlockModel):
    """Activations are scaled between the blocks."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden * 0.5, mask=torch.ones(1))
        return Output(self.head(hidden).sum())


class _Rest(Block):
    """A block that returns its mask, too."""

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        return super().forward(hidden, mask), 2 * mask


class _Unused(BlockModel):
    """The blocks return tuples, of which only the activations are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Rest() for _ in range(BLOCKS)).requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden, rest = self.embed(ids), []
        for layer in self.layers:
            hidden, more = layer(hidden, mask=torch.ones(1))
            rest.append(more)
        return self.finish(self.head(hidden), rest)

    def finish(self, logits: torch.Tensor, rest: list[Any]) -> Output:
        return Output(logits.sum())


class _Summed(_Unused):
    """The loss has the second values of the blocks in it."""

    def finish(self, logits: torch.Tensor, rest: list[Any]) -> Output:
        return Output(logits.sum() + sum(each.sum() for each in rest))


class _Shown(_Unused):
    """The model reads the shape of the second values, which other machines do not have."""

    def finish(self, logits: torch.Tensor, rest: list[Any]) -> Output:
        return Output(logits.sum() * rest[0].shape[0])


def test_blocks_may_return_more_than_is_used() -> None:
    with empty_weights():
        model = _Unused()
    outline = outline_of(model)
    assert outline.form.length == 2
    assert len(outline.blocks) == BLOCKS


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_Summed, "uses more than the first value that the blocks of layers return"),
        (_Shown, "cannot be traced: 'NoneType' object has no attribute 'shape'"),
        (_Shortcut, "the loss depends on embed.weight in another way"),
        (_SecondPath, "receives a second value that depends on parameters"),
        (_Backwards, "not called once, in order"),
        (_Between, "changes the activations between the blocks"),
    ],
)
def test_models_that_cannot_be_split_are_refused(kind: Callable[[], nn.Module], reason: str) -> None:
    with empty_weights():
        model = kind()
    with pytest.raises(RunError, match=reason):
        outline_of(model)


def test_list_of_blocks_is_found_or_named() -> None:
    two = nn.ModuleDict(
        {"a": nn.ModuleList(map(nn.Linear, (2, 2), (2, 2))), "b": nn.ModuleList([nn.Tanh()] * 2)}
    )
    with pytest.raises(RunError, match="2 lists of that length"):
        find_blocks(two)
    assert find_blocks(two, "b") == "b"
    with pytest.raises(RunError, match="0 lists of blocks called c") as caught:
        find_blocks(two, "c")
    assert caught.value.hint == "Give one of a, b."
    with pytest.raises(RunError, match="no such list"):
        find_blocks(nn.Sequential(nn.Linear(2, 2)))


def test_weight_of_a_microbatch_is_its_tokens_or_samples() -> None:
    assert tokens_of(INPUTS) == 6.0
    assert tokens_of((torch.zeros(3, 2), torch.zeros(3))) == 3.0


def test_sizes_tell_frozen_from_trained() -> None:
    model = empty_model()
    parts = measure_parts(model, outline_of(model))
    trained = sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sum(part.trained_bytes for part in parts.blocks) == trained
    assert parts.before.frozen_bytes == 4 * model.embed.weight.numel()
    assert parts.boundary_bytes == 4 * 2 * 5 * WIDTH


def test_sample_of_files_tells_other_weights_apart_and_not_other_files(base: Path, tmp_path: Path) -> None:
    tensors = {name: value for path in base.glob("*.safetensors") for name, value in load_file(path).items()}
    sample = WeightFiles(base).sample()

    def written(name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "all.safetensors")
        return WeightFiles(folder).sample()

    assert written("in-one-file") == sample
    tensors[max(tensors)] += 1
    tensors[min(tensors)] += 1
    assert written("other-weights") != sample


def test_sample_of_stacked_experts_reads_the_first_one_only(tmp_path: Path) -> None:
    """All of them may be larger than the memory."""

    def sample_with(expert: int) -> str:
        folder = tmp_path / f"changed-{expert}"
        folder.mkdir()
        experts = torch.zeros(20, 20, 4)
        experts[expert] = 1.0
        save_file({"experts": experts}, folder / "model.safetensors")
        return WeightFiles(folder).sample()

    assert sample_with(1) == sample_with(2)
    assert sample_with(0) != sample_with(3)
