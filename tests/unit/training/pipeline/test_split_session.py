"""Refusals and history of a session that splits a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from barnraise.agent_client.profile import DRY_RUN, PROFILE_FILE, SplitProfile, decode_profile
from barnraise.core.errors import RunError
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.pipeline.block_model import BLOCKS, WIDTH, BlockModel, loader, write_base


def make_session() -> Session:
    return Session(SingleWorkerManager(), seed=0, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def split(run: Session, folder: Path | None, model: nn.Module | None = None, **options: Any) -> Any:
    if model is None:
        with run.empty():
            model = BlockModel()
    return run.split(model, loader(), weights=folder, optimizer=make_optimizer, **options)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_base(tmp_path / "base")
    return tmp_path / "base"


def test_logged_values_are_in_the_history_one_step_later(base: Path) -> None:
    run = make_session()
    model, batches = split(run, base)
    losses = []
    for _ in run.epochs(1):
        for batch in batches:
            losses.append(model.train_step(batch))
            run.log(loss=losses[-1])
            assert run.every(2) == (run.step % 2 == 0)
    assert [entry["loss"] for entry in run.history] == losses[:2]
    assert (run.done, run.total_steps, len(batches)) == (3, 3, 3)


def test_batch_that_is_not_trained_is_an_error(base: Path) -> None:
    run = make_session()
    _, batches = split(run, base)
    with pytest.raises(RunError, match="a batch was not trained"):
        list(batches)


def test_other_ways_to_train_are_refused_beside_it(base: Path) -> None:
    run = make_session()
    split(run, base)
    with pytest.raises(RunError, match=r"run\.map does not work with a split model"):
        run.map(str, [1])
    with pytest.raises(RunError, match=r"run\.weight does not work"):
        run.weight(2.0)
    with pytest.raises(RunError, match="prepare was called twice"):
        run.prepare(nn.Linear(1, 1), make_optimizer([nn.Parameter(torch.zeros(1))]), loader())
    with pytest.raises(RunError, match=r"called after run\.prepare"):
        split(run, base)


def test_split_after_tracked_objects_is_refused(base: Path) -> None:
    run = make_session()
    run.track("thing", torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    with pytest.raises(RunError, match=r"run\.track"):
        split(run, base)


def test_new_weights_of_a_model_in_memory_are_not_lost_silently() -> None:
    with pytest.raises(RunError, match="a model with weights in memory cannot be split"):
        make_session().split(BlockModel(), loader(), optimizer=make_optimizer)


def test_trained_parameter_of_two_parts_is_refused(base: Path) -> None:
    run = make_session()
    with run.empty():
        model = BlockModel()
        model.head.weight = model.embed.weight
        model.embed.weight.requires_grad_()
    with pytest.raises(RunError, match=r"embed\.weight is trained and used in several parts"):
        split(run, base, model)


def test_base_in_int8_trains_about_as_the_exact_one(base: Path) -> None:
    losses: dict[str, list[float]] = {}
    for form in ("exact", "int8"):
        model, batches = split(make_session(), base, base=form)
        losses[form] = [model.train_step(batch) for batch in batches]
    assert losses["int8"] != losses["exact"]
    assert losses["int8"] == pytest.approx(losses["exact"], rel=0.01)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ({"order": "zero"}, "Take one of '1F1B', 'GPipe'."),
        ({"activations": "fp8"}, "Take one of 'exact', 'bf16', 'int8'."),
        ({"base": "int4"}, "Take one of 'exact', 'int8', 'nf4'."),
    ],
)
def test_unknown_options_are_refused_with_the_known_ones(
    option: dict[str, str], hint: str, base: Path
) -> None:
    with pytest.raises(RunError, match=r"run\.split knows no") as caught:
        split(make_session(), base, **option)
    assert caught.value.hint == hint


def test_objects_in_place_of_functions_are_refused_with_an_example(base: Path) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with pytest.raises(RunError, match="a function that makes an optimizer") as caught:
        make_session().split(BlockModel(), loader(), weights=base, optimizer=optimizer)  # type: ignore[arg-type]
    assert "optimizer=lambda parameters:" in caught.value.hint
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(RunError, match="a function that makes a scheduler"):
        split(make_session(), base, scheduler=scheduler)


def test_batch_of_the_loader_is_refused(base: Path) -> None:
    model, _ = split(make_session(), base)
    with pytest.raises(RunError, match=r"train_step got dict in place of a batch of run\.split"):
        model.train_step(next(iter(loader())))


def test_call_of_a_split_model_says_what_to_call(base: Path) -> None:
    model, _ = split(make_session(), base)
    with pytest.raises(RunError, match="cannot be called") as caught:
        model(ids=torch.zeros(1, 2))
    assert "train_step" in caught.value.hint


def test_model_without_anything_trained_is_refused(base: Path) -> None:
    run = make_session()
    with run.empty():
        model = BlockModel().requires_grad_(False)
    with pytest.raises(RunError, match="no parameter of the model is trained"):
        split(run, base, model)


def test_buffers_without_memory_are_refused(base: Path) -> None:
    run = make_session()
    with run.empty():
        model = BlockModel()
    model.scale = model.scale.to("meta")  # as in the context of torch.device("meta")
    with pytest.raises(RunError, match="the buffer scale has no memory") as caught:
        split(run, base, model)
    assert "run.empty()" in caught.value.hint


class _Silent(BlockModel):
    """The model returns no loss, as those of Transformers do without labels."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        super().forward(ids, labels)
        return {"logits": ids}


def test_model_without_a_loss_is_refused(base: Path) -> None:
    run = make_session()
    with run.empty():
        model = _Silent()
    with pytest.raises(RunError, match="_Silent returns no loss") as caught:
        split(run, base, model)
    assert "labels" in caught.value.hint


def test_base_without_files_cannot_be_in_int8() -> None:
    with pytest.raises(RunError, match="a base without weights cannot be held in int8"):
        split(make_session(), None, base="int8")


def test_dry_run_measures_and_ends_before_the_first_step(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(DRY_RUN, "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        split(make_session(), base)
    assert caught.value.code == 0
    profile = decode_profile((tmp_path / PROFILE_FILE).read_bytes())
    assert isinstance(profile, SplitProfile)
    assert (profile.batch, profile.batches, profile.order) == (8, 4, "1F1B")
    assert len(profile.blocks) == BLOCKS
    (worker,) = profile.workers
    assert worker.name == "this machine"
    assert worker.memory_bytes > 0
    assert 0 < worker.forward_s < 1.0
    assert 0 < worker.backward_s < 1.0
    assert profile.rates == ((1e9,),)
    assert sum(part.trained for part in profile.blocks) == BLOCKS * 4 * 2 * 2 * WIDTH


def test_tensors_are_gathered_beside_a_split_model(base: Path) -> None:
    run = make_session()
    split(run, base)
    assert run.gather(torch.tensor(3.0)).tolist() == [3.0]


def test_callbacks_of_the_script_follow_each_commit(base: Path) -> None:
    run = make_session()
    model, batches = split(run, base)
    done: list[int] = []
    run.on_commit(lambda session: done.append(session.done))
    for _ in run.epochs(1):
        for batch in batches:
            model.train_step(batch)
    assert done == [1, 2, 3]
