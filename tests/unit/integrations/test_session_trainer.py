"""Trainer in a session against the plain Trainer: losses, metrics and parameters are those of one machine."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from barnraise.agent_client.profile import DRY_RUN, PROFILE_FILE, StepProfile, decode_profile
from barnraise.checkpoint.serialization import FlatState
from barnraise.core.errors import ProtocolError, RunError
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.threaded_group import LoneWorker, ThreadWorker, run_workers

transformers = pytest.importorskip("transformers", reason="needs transformers")

from accelerate.parallelism_config import ParallelismConfig  # noqa: E402
from transformers.trainer_utils import EvalLoopOutput  # noqa: E402

from barnraise.integrations.session_trainer import session_class  # noqa: E402
from barnraise.integrations.trainer_notes import check_attribute, decode_notes, encode_notes  # noqa: E402
from tests.unit.integrations.tiny_llama import (  # noqa: E402
    arguments,
    collate,
    logged,
    sentences,
    tiny_llama,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def session(manager: Any, unit: int = 0) -> Session:
    return Session(manager, seed=1, unit=unit, checkpoints=CheckpointManager(None, 60.0, 1))


def plain(folder: Path, **changes: Any) -> Any:
    return transformers.Trainer(
        model=tiny_llama(),
        args=arguments(folder, **changes),
        train_dataset=sentences(),
        eval_dataset=sentences(5),
        data_collator=collate,
    )


def shared(folder: Path, run: Session, **changes: Any) -> Any:
    return session_class(transformers.Trainer)(
        model=tiny_llama(),
        args=arguments(folder, **changes),
        train_dataset=sentences(),
        eval_dataset=sentences(5),
        data_collator=collate,
        session=run,
    )


def assert_equal_logs(reference: Any, other: Any) -> None:
    assert [sorted(entry) for entry in logged(reference)] == [sorted(entry) for entry in logged(other)]
    for expected, entry in zip(logged(reference), logged(other), strict=True):
        assert entry == pytest.approx(expected, rel=1e-6), (expected, entry)


def assert_equal_models(reference: Any, other: Any) -> None:
    for expected, parameter in zip(reference.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)


def test_trainer_alone_in_a_session_equals_the_plain_one(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    reference, other = (
        plain(tmp_path / "plain", **changes),
        shared(tmp_path / "s", session(LoneWorker()), **changes),
    )
    expected, result = reference.train(), other.train()
    assert_equal_logs(reference, other)
    assert_equal_models(reference, other)
    assert result.global_step == expected.global_step
    assert result.training_loss == pytest.approx(expected.training_loss, rel=1e-6)
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == sorted(
        path.name for path in (tmp_path / "s").iterdir()
    )


def test_trainers_of_three_workers_equal_the_plain_one(tmp_path: Path) -> None:
    reference = plain(tmp_path / "plain")
    reference.train()
    # Sequentially, because the arguments set up a state that Accelerate keeps once for each process.
    ready = [shared(tmp_path / str(rank), session(LoneWorker(), unit=1)) for rank in range(3)]

    def train(worker: ThreadWorker) -> Any:
        trainer = ready[worker.rank]
        trainer._session = session(worker, unit=1)
        trainer.train()
        return trainer

    for other in run_workers(3, train):
        assert_equal_logs(reference, other)
        assert_equal_models(reference, other)


class Restoring(CheckpointManager):
    """Checkpoints of a run that is resumed from this state."""

    def __init__(self, parts: FlatState) -> None:
        super().__init__(None, 60.0, 1)
        self.parts = parts

    def restore(self, manager: Any, state: Any) -> tuple[int, int]:
        return 0, state.load(self.parts)


class Capture(transformers.TrainerCallback):
    """Copies what a checkpoint of reference step would contain."""

    def __init__(self, run: Session, step: int) -> None:
        self.run, self.step = run, step
        self.parts: list[FlatState] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.run.on_commit(self.copy)

    def copy(self, run: Session) -> None:
        if run.done == self.step:
            parts = run._state.flatten(run.done, is_checkpoint=True)
            self.parts.append(FlatState(parts.skeleton, [tensor.clone() for tensor in parts.tensors]))


@pytest.mark.parametrize("step", [3, 4, 8], ids=["before-its-log", "end-of-epoch", "last"])
def test_resumed_trainer_equals_one_that_was_not_interrupted(tmp_path: Path, step: int) -> None:
    run = session(LoneWorker())
    reference = shared(tmp_path / "reference", run, eval_strategy="epoch")
    capture = Capture(run, step)
    reference.add_callback(capture)
    reference.train()
    (parts,) = capture.parts
    resumed = Session(LoneWorker(), seed=1, unit=0, checkpoints=Restoring(parts))
    other = shared(tmp_path / "other", resumed, eval_strategy="epoch")
    other.train()
    assert_equal_logs(reference, other)
    assert_equal_models(reference, other)


def test_run_is_stopped_by_max_steps_in_an_epoch(tmp_path: Path) -> None:
    reference, other = (
        plain(tmp_path / "plain", max_steps=3),
        shared(tmp_path, session(LoneWorker()), max_steps=3),
    )
    reference.train()
    other.train()
    assert other.state.global_step == 3
    assert_equal_logs(reference, other)


@pytest.mark.parametrize("has_folder", [False, True])
def test_best_model_that_is_not_on_this_machine_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, has_folder: bool
) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    changes |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    run = session(LoneWorker())
    reference = shared(tmp_path / "reference", run, **changes)
    capture = Capture(run, 5)
    reference.add_callback(capture)
    reference.train()
    assert reference.state.best_global_step == 4
    resumed = Session(LoneWorker(), seed=1, unit=0, checkpoints=Restoring(capture.parts[0]))
    other = shared(tmp_path / ("reference" if has_folder else "other"), resumed, **changes)
    with caplog.at_level("WARNING", "barnraise.training"):
        other.train()
    is_warned = "the best model, of step 4, is not loaded" in caplog.text
    assert is_warned is not has_folder
    if has_folder:
        assert_equal_models(reference, other)


def test_device_that_the_agent_assigned_is_that_of_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path)
    args.__dict__["_setup_devices"] = torch.device("meta")  # as on a machine with an accelerator
    monkeypatch.setenv("BARNRAISE_DEVICE", "cpu")
    trainer = session_class(transformers.Trainer)(
        model=tiny_llama(), args=args, train_dataset=sentences(), session=session(LoneWorker())
    )
    assert trainer.args.device == torch.device("cpu")
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cpu"}


def test_model_of_a_trainer_on_the_cpu_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_DEVICE", "meta")  # the accelerator of this worker
    trainer = shared(tmp_path, session(LoneWorker()), max_steps=1)
    trainer.train()
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cpu"}


class Tracker(transformers.TrainerCallback):
    """Tracker that starts a run on the main worker only, as those of Transformers do."""

    def __init__(self) -> None:
        self._initialized = False
        self.started = 0

    def setup(self, state: Any) -> None:
        self._initialized = True
        self.started += int(state.is_world_process_zero)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._initialized:
            self.setup(state)


def test_tracker_of_a_new_main_worker_starts_its_run(tmp_path: Path) -> None:
    trainer, tracker = shared(tmp_path, session(LoneWorker())), Tracker()
    trainer.add_callback(tracker)
    trainer.state.is_world_process_zero = False  # another worker is the main one
    trainer._begin()
    assert (tracker._initialized, tracker.started) == (True, 0)
    trainer._set_main()
    assert tracker.started == 1
    trainer._set_main()
    assert tracker.started == 1


def test_history_of_the_session_has_the_losses_and_evaluations(tmp_path: Path) -> None:
    run = session(LoneWorker(), unit=1)
    trainer = shared(tmp_path, run, logging_steps=1, eval_strategy="epoch")
    trainer.train()
    logs = trainer.state.log_history
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    assert [entry["loss"] for entry in run.history] == pytest.approx(losses[:-1], rel=1e-5)
    first, last = (entry["eval_loss"] for entry in logs if "eval_loss" in entry)
    assert [entry["eval_loss"] for entry in run.history if "eval_loss" in entry] == [first, last]
    assert "eval_runtime" not in run.history[-1]
    trainer.evaluate(sentences(2))
    assert run.history[-1]["eval_loss"] not in (first, last)


class Scored(transformers.Trainer):
    """Trainer whose evaluations have these scores, and compute nothing."""

    scores: list[float]

    def evaluation_loop(self, *_: Any, **__: Any) -> Any:
        return EvalLoopOutput(None, None, {"eval_score": self.scores.pop(0)}, 1)


def scored(folder: Path, scores: list[float], **changes: Any) -> Any:
    """Return a Trainer that evaluates after every second of eight steps, and may stop early."""
    changes = {"eval_strategy": "steps", "eval_steps": 2, **changes}
    trainer = session_class(Scored)(
        model=tiny_llama(),
        args=arguments(folder, metric_for_best_model="score", greater_is_better=True, **changes),
        train_dataset=sentences(),
        eval_dataset=sentences(5),
        data_collator=collate,
        callbacks=[transformers.EarlyStoppingCallback(1)],
        session=session(LoneWorker(), unit=1),
    )
    trainer.scores = scores
    return trainer


GROWING, SAME = [0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("scores", "steps"), [((SAME, GROWING), 5), ((GROWING, SAME), 8)], ids=["main-stops", "other-stops"]
)
def test_main_worker_decides_for_all_when_the_training_stops(
    tmp_path: Path, scores: tuple[list[float], list[float]], steps: int
) -> None:
    ready = [scored(tmp_path / str(rank), list(own)) for rank, own in enumerate(scores)]

    def train(worker: ThreadWorker) -> Any:
        trainer = ready[worker.rank]
        trainer._session = session(worker, unit=1)
        trainer.train()
        return trainer

    first, second = run_workers(2, train)
    assert first.state.global_step == second.state.global_step == steps
    assert_equal_models(first, second)


def test_stop_after_an_epoch_evaluates_no_further_epoch(tmp_path: Path) -> None:
    changes = {"eval_strategy": "epoch", "num_train_epochs": 4}  # of four steps
    ready = [scored(tmp_path / str(rank), list(SAME), **changes) for rank in range(2)]

    def train(worker: ThreadWorker) -> Any:
        trainer = ready[worker.rank]
        trainer._session = session(worker, unit=1)
        trainer.train()
        return trainer

    for trainer in run_workers(2, train):
        steps = [entry["step"] for entry in trainer.state.log_history if "eval_score" in entry]
        assert (trainer.state.global_step, steps) == (9, [4, 8])


def test_worker_that_trains_alone_stops_at_its_evaluation(tmp_path: Path) -> None:
    trainer = scored(tmp_path, list(SAME))
    trainer.train()
    assert trainer.state.global_step == 4


class MeanOfBatch(transformers.Trainer):
    """Trainer whose loss is a mean over each micro-batch, without a look at the number of items."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return logits.square().mean(dim=(1, 2)).mean()


def test_loss_that_is_a_mean_of_each_batch_is_weighted_by_samples(tmp_path: Path) -> None:
    def make(kind: Any, folder: Path, **more: Any) -> Any:
        args = arguments(folder, max_steps=3, logging_steps=1)
        return kind(model=tiny_llama(), args=args, train_dataset=sentences(), data_collator=collate, **more)

    reference = make(MeanOfBatch, tmp_path / "plain")
    other = make(session_class(MeanOfBatch), tmp_path / "s", session=session(LoneWorker(), unit=4))
    reference.train()
    other.train()
    assert_equal_logs(reference, other)
    assert_equal_models(reference, other)


class Measuring(transformers.Trainer):
    """Trainer with metrics as TRL stores them; the name of one depends on the micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}
        self._total_train_tokens = 0
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        is_long = inputs["input_ids"].shape[1] > 9
        self._metrics["train"]["long" if is_long else "short"].append(10.0 if is_long else 1.0)
        return super().training_step(model, inputs, *args)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        means = {name: sum(values) / len(values) for name, values in self._metrics["train"].items()}
        super().log({**logs, **means}, *args)
        self._metrics["train"].clear()


def test_metrics_of_different_names_are_not_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = session_class(Measuring)(
        model=tiny_llama(),
        args=arguments(tmp_path, logging_steps=1),
        train_dataset=sentences(),
        data_collator=collate,
        session=session(LoneWorker(), unit=1),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "num_tokens" in entry]
    assert len(steps) == 8
    assert all(entry.get("long", 10.0) == 10.0 and entry.get("short", 1.0) == 1.0 for entry in steps)
    assert "micro-batches with different metrics" in caplog.text


def test_dry_run_measures_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRY_RUN, "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        shared(tmp_path / "out", session(LoneWorker())).train()
    profile = decode_profile((tmp_path / PROFILE_FILE).read_bytes())
    assert isinstance(profile, StepProfile)
    assert (profile.batch, profile.unit) == (8, 1)
    (worker,) = profile.workers
    assert worker.samples > 0


def test_notes_carry_the_log_to_another_worker(tmp_path: Path) -> None:
    from barnraise.integrations.session_trainer import _Notes

    donor = shared(tmp_path / "donor", session(LoneWorker()))
    donor.train()
    joining = shared(tmp_path / "joining", session(LoneWorker()))
    joining.current_flos = 0
    joining._tr_loss, joining._total_loss_scalar, joining._globalstep_last_logged = torch.tensor(0.0), 0.0, 0
    _Notes(joining).load(_Notes(donor).dump())
    assert joining.state.log_history == donor.state.log_history
    assert joining.state.global_step == donor.state.global_step
    assert joining._total_loss_scalar == donor._total_loss_scalar


@pytest.mark.parametrize("epoch", [0, 1])
def test_worker_that_missed_the_end_of_an_epoch_does_not_evaluate_it_again(
    tmp_path: Path, epoch: int
) -> None:
    from barnraise.integrations.session_trainer import _Notes

    donor = shared(tmp_path / "donor", session(LoneWorker()), max_steps=6)  # an epoch has four
    donor.train()
    late = shared(tmp_path / "late", session(LoneWorker()))
    late.current_flos = 0
    late._tr_loss, late._total_loss_scalar, late._globalstep_last_logged = torch.tensor(0.0), 0.0, 0
    ends = []

    def no_batches() -> Any:
        _Notes(late).load(_Notes(donor).dump())  # as in a wait for the next batch
        late.control.should_training_stop = False
        yield from ()

    late._train_epoch(None, no_batches(), epoch, 4, ends.append)
    assert ends == ([False] if epoch == 0 else [False, True])


def test_unreadable_notes_are_rejected() -> None:
    from barnraise.integrations.trainer_notes import TrainerNotes

    log = [{"loss": math.nan, "eval_of_classes": torch.ones(2)}]
    content = encode_notes(TrainerNotes(global_step=3, log_history=log))
    assert decode_notes(content).global_step == 3
    with pytest.raises(ProtocolError):
        decode_notes(content[:-1])


@pytest.mark.parametrize(
    ("own", "value", "is_accepted"),
    [
        (0, 3, True),
        (None, 0.5, True),
        (False, True, True),
        ([], [1, 2.5], True),
        ("out/log", "out/log", True),
        (0, "3", False),
        (0, [3], False),
        (False, 2, False),
        (None, "/etc/passwd", False),
        ("out/log", "/etc/passwd", False),
        ([], [["/etc/passwd"]], False),
        ({}, {"path": "/etc/passwd"}, False),
    ],
)
def test_attribute_of_a_callback_keeps_its_type(own: Any, value: Any, *, is_accepted: bool) -> None:
    if is_accepted:
        assert check_attribute("Stopper.count", value, own) == value
        return
    with pytest.raises(ProtocolError, match=r"Stopper\.count"):
        check_attribute("Stopper.count", value, own)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"fsdp": "full_shard"}, "fsdp"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "parallelism_config"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "reduce_lr_on_plateau"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    ],
)
def test_argument_without_meaning_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(RunError) as caught:
        shared(tmp_path, session(LoneWorker()), **changes)
    assert name in caught.value.message
    assert caught.value.hint


def test_resuming_from_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="resume_from_checkpoint"):
        shared(tmp_path, session(LoneWorker())).train(resume_from_checkpoint=True)


def test_class_without_a_trainers_loop_is_refused() -> None:
    with pytest.raises(RunError, match="no training loop"):
        session_class(dict)
