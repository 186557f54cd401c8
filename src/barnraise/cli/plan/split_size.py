"""Plan of a language model that is split, from its ``config.json`` and the speeds of machines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal, NamedTuple

from barnraise.cli.plan.options import PlanOptions
from barnraise.cli.plan.split import report_of_problem, show_split
from barnraise.core.errors import ConfigError
from barnraise.planning import PlanCluster
from barnraise.planning.inputs.cluster import EFFICIENCY
from barnraise.planning.split.language_model import LORA_RANK, NUMBER_BYTES, LanguageShape, read_shape
from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.stage_time import LinkRates

BaseForm = Literal["exact", "int8", "nf4"]
_BLOCK_BYTES: dict[BaseForm, float] = {"exact": NUMBER_BYTES, "int8": 1.0, "nf4": 4.5 / 8}
_USABLE = 0.8  # of a machine's memory; a run measures what is free
_MICRO_BATCHES = 8  # of a step, as `run.split` makes them
_BYTES_PER_MBIT = 1e6 / 8


class EstimatedTraining(NamedTuple):
    """Training of a split model that nothing has measured. ``tokens``: of a sample."""

    shape: LanguageShape
    tokens: int
    batch: int
    base: BaseForm

    @property
    def samples(self) -> int:
        """Return the samples of a micro-batch."""
        return max(1, self.batch // _MICRO_BATCHES)

    @property
    def words(self) -> str:
        """Return what the figures rest on."""
        return (
            f"Nothing was measured with this model. It is taken to be trained with LoRA (rank {LORA_RANK}, "
            f"all linear layers) and gradient checkpointing, on samples of {self.tokens} tokens. A machine "
            f"computes at {EFFICIENCY:.0%} of its measured or public speed, and {_USABLE:.0%} of its memory "
            "are free. `barnraise run --dry-run` measures your own script instead."
        )


def read_config(folder: Path) -> LanguageShape:
    """Return the shape of the model in a folder, or of a ``config.json`` itself."""
    path = folder if folder.suffix == ".json" else folder / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--config {path} cannot be read: {error}",
            hint="Name a model's folder with its config.json, as it was downloaded.",
        ) from error
    if not isinstance(document, dict):
        raise ConfigError(f"--config {path} is no table", hint="Name the config.json of a model.")
    return read_shape(document, str(path))


def problem_of_cluster(training: EstimatedTraining, cluster: PlanCluster) -> SplitProblem:
    """Return the model, the machines and their links as the planner takes them."""
    shape, samples = training.shape, training.samples
    parts = shape.parts(training.tokens * samples, _BLOCK_BYTES[training.base])
    machines = tuple(
        SplitMachine(
            member.name,
            round(_USABLE * member.memory_bytes),
            shape.speed(training.tokens, samples, (member.tflops or 0.0) * 1e12 * EFFICIENCY),
        )
        for member in cluster.members
    )
    paths = {(path.source, path.target): path for path in cluster.paths}
    names = [member.name for member in cluster.members]

    def rate(a: str, b: str) -> float:
        return paths[a, b].mbps * _BYTES_PER_MBIT if (a, b) in paths else 0.0

    links = LinkRates(
        tuple(tuple(rate(a, b) for b in names) for a in names),
        tuple(tuple(paths[a, b].latency_s if (a, b) in paths else 0.0 for b in names) for a in names),
    )
    batches = math.ceil(training.batch / samples)
    return SplitProblem(parts, machines, links, batches, parts.boundary_bytes)


def run_estimated(training: EstimatedTraining, cluster: PlanCluster, *, wishes: PlanOptions) -> int:
    """Show how a model would be split over a cluster. Return 1 if it does not fit."""
    if wishes.picture is not None or wishes.levels is not None or wishes.sync != "exact":
        raise ConfigError(
            "--picture, --levels and --sync do not work with a split model", hint="Leave them out."
        )
    report = report_of_problem(problem_of_cluster(training, cluster), training.batch)
    notes = (training.words, *(f"Note: {note}" for note in cluster.notes))
    return show_split(report._replace(notes=notes), as_json=wishes.as_json)
