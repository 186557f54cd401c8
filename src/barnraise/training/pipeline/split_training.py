"""Training of a split model as the script sees it: ``run.split``."""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from barnraise.checkpoint.adapter_files import write_adapter
from barnraise.checkpoint.files import write_model
from barnraise.checkpoint.serialization import decode_tensor, encode_tensor
from barnraise.core.errors import RunError
from barnraise.planning.split.stage_placement import ModelParts, PartSize
from barnraise.runs.sharding import DataOrder, MicroBatch
from barnraise.training.autotune.profiler import is_dry_run
from barnraise.training.data.loader import MicroBatchLoader
from barnraise.training.device_placement import move_batch
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.group.interface import GroupManager
from barnraise.training.metrics import MetricsLog
from barnraise.training.pipeline.base.narrow_layers import BASE_FORMS, BaseForm, narrow_linear_layers
from barnraise.training.pipeline.machine_memory import free_memory
from barnraise.training.pipeline.members.member_stage import SplitTask
from barnraise.training.pipeline.members.task_description import describe_model, describe_optimizer
from barnraise.training.pipeline.outline import LossFunction, ModelOutline, find_blocks, trace_outline
from barnraise.training.pipeline.passes.activations import ACTIVATIONS, ActivationCodec, Activations
from barnraise.training.pipeline.passes.order import ORDERS, Order
from barnraise.training.pipeline.prediction.block_probe import ProbedModel
from barnraise.training.pipeline.prediction.dry_run import end_dry_run
from barnraise.training.pipeline.prediction.kept_activations import measure_kept, with_kept
from barnraise.training.pipeline.split_loop import SplitLoop
from barnraise.training.pipeline.trained_state import OptimizerFactory, SchedulerFactory
from barnraise.training.pipeline.weights import StageWeights, WeightFiles
from barnraise.training.progress_report import ProgressReporter, TrainingStatus
from barnraise.training.record.recorder import RunRecorder
from barnraise.training.record.sinks import open_sink
from barnraise.training.record.split_record import SplitRecord
from barnraise.training.recovery.failure_notice import install_failure_notice
from barnraise.training.state.adapter import is_adapter_folder
from barnraise.training.state.checkpoint_manager import CheckpointManager


class SplitOptions(NamedTuple):
    """Options of ``run.split`` beside the model and the loader."""

    optimizer: OptimizerFactory
    weights: Path | None
    scheduler: SchedulerFactory | None
    blocks: str | None
    loss: LossFunction | None
    weight: Callable[[Any], float] | None
    order: Order
    activations: Activations
    base: BaseForm = "exact"

    def check(self) -> None:
        """Raise RunError if an option has an unknown value, or is an object in place of a function."""
        example = "lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)"
        if not callable(self.optimizer):
            raise RunError(
                "run.split needs a function that makes an optimizer, as each machine makes its own",
                hint=f"Pass optimizer={example}.",
            )
        if self.scheduler is not None and not callable(self.scheduler):
            raise RunError(
                "run.split needs a function that makes a scheduler, as each machine makes its own",
                hint="Pass scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100).",
            )
        for name, value, known in (
            ("order", self.order, ORDERS),
            ("activations", self.activations, ACTIVATIONS),
            ("base", self.base, BASE_FORMS),
        ):
            if value not in known:
                words = ", ".join(map(repr, known))
                raise RunError(f"run.split knows no {name}={value!r}", hint=f"Take one of {words}.")

    def facts(self, data: DataOrder, files: WeightFiles | None, device: torch.device) -> dict[str, object]:
        """Return the options that all members must have alike, by name."""
        return {
            "order": self.order,
            "form of activations": self.activations,
            "base": self.base,
            "sample of the model files": files.sample() if files is not None else "none",
            **{name.replace("_", " "): value for name, value in data._asdict().items()},
            **describe_optimizer(self.optimizer, self.scheduler, device),
        }


class SplitBatch(NamedTuple):
    """One step: give it to ``model.train_step``. ``target``: finished steps after it."""

    target: int


class SplitTraining:
    """A split model and its steps. The script has it as model and as batches."""

    def __init__(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        options: SplitOptions,
        *,
        manager: GroupManager,
        metrics: MetricsLog,
        seed: int,
        unit: int,
        device: torch.device,
        checkpoints: CheckpointManager,
    ) -> None:
        options.check()
        if isinstance(loader.dataset, IterableDataset):
            raise RunError("a split model does not train on a stream", hint="Use a map-style dataset.")
        self.model, self._manager, self._metrics = model, manager, metrics
        self.data = MicroBatchLoader(loader, unit or max(1, (loader.batch_size or 1) // 8), seed)
        loss = options.loss or loss_of_output
        sample = self._first_microbatch()
        files = WeightFiles(options.weights) if options.weights is not None else None
        if files is None and not all(parameter.is_meta for parameter in model.parameters()):
            raise RunError(
                "a model with weights in memory cannot be split",
                hint="Build it in `with run.empty():`, and give weights=FOLDER.",
            )
        _check_model(model)
        path = find_blocks(model, options.blocks)
        if options.base != "exact":
            if files is None:
                raise RunError(
                    f"a base without weights cannot be held in {options.base}",
                    hint="Give weights=FOLDER, or base='exact'.",
                )
            narrow_linear_layers(model, model.get_submodule(path), options.base)
        outline = trace_outline(model, path, loss, sample)
        _refuse_trained_ties(model, outline)
        weights = StageWeights(model, files, seed, device)
        weights.drop_all_but(())
        weights.load_buffers()
        for buffers in model.modules():
            buffers._buffers.update(
                {name: value.to(device) for name, value in buffers._buffers.items() if value is not None}
            )
        model.train()
        kept = measure_kept(model, path, loss, sample)
        task = SplitTask(
            model,
            outline,
            with_kept(measure_parts(model, outline), kept),
            loss,
            options.weight or tokens_of,
            options.optimizer,
            options.scheduler,
            options.order,
            ActivationCodec(outline.dtype, options.activations),
            describe_model(model, outline, options.facts(self.data.data_order, files, device)),
        )
        self._checkpoints = checkpoints
        record = SplitRecord(metrics)
        self.loop = SplitLoop(manager, task, weights, self.data, device, checkpoints, record)
        self._probed: ProbedModel | None = ProbedModel(
            model, outline, weights, loss, move_batch(sample, device)
        )
        self._device = device

    def start(self, session: TrainingStatus) -> None:
        """Join the group, and report the progress from now on."""
        worker = WorkerId.from_environment()
        record = self.loop.record
        record.on_commit.append(self._manager.report_trained)
        if worker is not None:
            install_failure_notice(worker)
            record.on_commit.append(ProgressReporter(worker, session, self.data.batch))
        self.recorder = recorder = RunRecorder(
            lambda: open_sink(worker), self._manager, record, self._metrics, record, self.data.batch
        )
        recorder.total_steps = lambda: session.total_steps
        recorder.attach(self._checkpoints)
        record.on_placement.append(recorder.note_placement)
        if worker is not None or is_dry_run():
            self._measure()  # while the others of the group still train
        atexit.register(self._manager.close)
        self._manager.wait_for_admission()
        if is_dry_run():
            end_dry_run(self.loop, self._manager, self.data)
        self.loop.join_next_group(None)

    def _measure(self) -> None:
        """Measure the speed of this machine, before it has a stage."""
        probed, self._probed = self._probed, None
        if probed is not None:
            self.loop.forecast.probe(probed, free_memory(self._device) // 2, self._device)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next step."""
        return self.data.data_order.locate_step(self.loop.done)[0]

    def train_step(self, batch: SplitBatch) -> float:
        """Train on a batch, on all machines together. Return its loss, which is the same on each."""
        if not isinstance(batch, SplitBatch):
            raise RunError(
                f"model.train_step got {type(batch).__name__} in place of a batch of run.split",
                hint="Loop over the batches that run.split has returned, not over the loader.",
            )
        return self.loop.reach(batch.target)

    def __call__(self, *_: object, **__: object) -> None:
        raise RunError(
            "a split model cannot be called, because no machine has all of it",
            hint="Call model.train_step(batch) in the loop.",
        )

    def __len__(self) -> int:
        """Return the steps of an epoch."""
        return len(self.data)

    def __iter__(self) -> Iterator[SplitBatch]:
        epoch = self.epoch
        while not self.data.is_over(epoch, self.loop.done):
            target = self.loop.done + 1
            yield SplitBatch(target)
            if self.loop.done < target:
                raise RunError(
                    "a batch was not trained", hint="Call model.train_step(batch) for each batch of the loop."
                )

    def save(self, path: Path, *, writes: bool) -> None:
        """Write what is trained, on the workers that write files. All workers call it."""
        tensors = self.loop.gather_trained()
        if not writes:
            return
        info = {"steps": str(self.loop.done)}
        if is_adapter_folder(self.model, path):
            self._write_adapter(path, tensors, info)
        else:
            write_model(tensors, path, info)

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all workers that call it, concatenated."""
        own = encode_tensor(value if value.dim() else value.reshape(1))
        return torch.cat([decode_tensor(data) for data in self.loop.gather(own) if data])

    def _write_adapter(self, folder: Path, tensors: Mapping[str, torch.Tensor], info: dict[str, str]) -> None:
        description = self.loop.adapter
        if description is None:
            raise RunError(f"{folder} cannot be written: the model has no adapter", hint="Name a file.")
        write_adapter(folder, description, tensors, info)

    def _first_microbatch(self) -> Any:
        unit = self.data.microbatches(0)[0]
        return next(self.data.batches(0, [MicroBatch(unit.number, unit.first, unit.last)]))


def loss_of_output(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Return the loss of a model that computes it from its inputs, as those of Transformers do."""
    output = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise RunError(
            f"{type(model).__name__} returns no loss",
            hint="Put labels into the batches, or pass loss=lambda model, inputs: ... to run.split.",
        )
    return loss


def tokens_of(inputs: Any) -> float:
    """Return the number of tokens that a causal model learns to predict, or else of samples."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if isinstance(labels, torch.Tensor) and labels.dim() > 1:
        return float((labels[:, 1:] != -100).sum())
    first = next(leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return float(len(first))


def measure_parts(model: nn.Module, outline: ModelOutline) -> ModelParts:
    """Return the sizes of the parts of a model."""
    parameters = dict(model.named_parameters())

    def size(names: frozenset[str]) -> PartSize:
        frozen = trained = 0
        for name in names:
            count = parameters[name].numel() * parameters[name].element_size()
            if parameters[name].requires_grad:
                trained += count
            else:
                frozen += count
        return PartSize(frozen, trained)

    boundary = math.prod(outline.shape) * outline.dtype.itemsize
    tied = size(outline.before & outline.after).frozen_bytes
    blocks = tuple(map(size, outline.blocks))
    return ModelParts(size(outline.before), blocks, size(outline.after), boundary, tied)


def _check_model(model: nn.Module) -> None:
    """Raise RunError if nothing of a model is trained, or if its buffers have no memory."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RunError(
            "no parameter of the model is trained",
            hint="Add an adapter, for example by get_peft_model(model, LoraConfig(r=8)).",
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise RunError(
                f"the buffer {name} has no memory, and no file has its values",
                hint="Build the model in `with run.empty():`, which keeps buffers.",
            )


def _refuse_trained_ties(model: nn.Module, outline: ModelOutline) -> None:
    """Raise RunError if a trained parameter is used in several parts, whose gradients would be summed."""
    parts = (outline.before, *outline.blocks, outline.after)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and sum(name in part for part in parts) > 1:
            raise RunError(
                f"{name} is trained and used in several parts of the model, which cannot be split yet",
                hint="Freeze it, for example by LoRA on the other layers.",
            )
