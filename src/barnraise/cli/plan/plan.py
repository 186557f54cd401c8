"""``barnraise plan``: which machines to train on, how, and how fast that will be. Starts nothing."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from barnraise.agent_client.profile import StepProfile
from barnraise.agent_client.run_requests import GraphRequest, GraphResponse
from barnraise.cli.agent_call import ask
from barnraise.cli.plan.options import PlanOptions
from barnraise.cli.plan.parse import check, machines_of, options_of, parse_count, parse_flops, parse_seconds
from barnraise.cli.plan.picture import picture
from barnraise.cli.plan.split_size import BaseForm, EstimatedTraining, read_config, run_estimated
from barnraise.cli.plan.text import PlanReport, describe, format_count
from barnraise.core.errors import AgentError, ConfigError, RunError
from barnraise.core.units import format_duration
from barnraise.planning import (
    Calibration,
    ModelSize,
    Plan,
    PlanCluster,
    PlanRanking,
    StepTimes,
    add_hypothetical,
    advise,
    build_cluster,
    cluster_from_graph,
    make_plans,
    observation,
    refit,
    without_machines,
)
from barnraise.topology import TopologyGraph, build_graph
from barnraise.topology.graph import decode_graph

# Forward and backward, for each parameter and each place that it is used at.
_FLOPS_PER_PARAMETER = 6
_MOST_STATE_BYTES = 1024.0
_SETTLED_STEPS = 4
_BATCH, _SPLIT_BATCH, _SPLIT_TOKENS = "256", "16", "1024"


@dataclass(frozen=True)
class Size:
    """Size of the model, as the user typed it. ``config``: folder of a language model that is split.

    ``base``: form of its frozen layers.
    """

    parameters: str | None = None
    batch: str | None = None
    tokens: str | None = None
    flops_per_sample: str | None = None
    seconds_per_sample: str | None = None
    config: Path | None = None
    base: BaseForm = "exact"


@dataclass(frozen=True)
class _Here:
    """The machines that a run would use, by node id, and this one, which may not be among them."""

    graph: TopologyGraph
    nodes: tuple[str, ...]
    this: str


@dataclass(frozen=True)
class PlanTrial:
    """Results of a dry run: the machines that took part, and the time of their steps."""

    machines: tuple[str, ...] = ()
    step_s: float | None = None
    is_settled: bool = False


def run(size: Size, *, on: tuple[str, ...], wishes: PlanOptions) -> int:
    """Plan from the size of a model alone."""
    check(wishes)
    if size.config is not None:
        return _run_split(size, size.config, on=on, wishes=wishes)
    if size.parameters is None or size.base != "exact":
        raise ConfigError(
            "barnraise plan needs the size of a model; --base goes with --config",
            hint="Give --parameters 124M, or --config FOLDER for a model that is split.",
        )
    parameters = parse_count(size.parameters, "--parameters", "124M")
    profile = StepTimes(batch=parse_count(size.batch or _BATCH, "--batch", "512"))
    seconds = None if size.seconds_per_sample is None else parse_seconds(size.seconds_per_sample)
    tokens = parse_count(size.tokens or "1", "--tokens", "1024")
    if size.flops_per_sample is None:
        flops = float(_FLOPS_PER_PARAMETER * parameters * tokens)
        each = "each parameter and token" if tokens > 1 else "each parameter; add --tokens if it is a text"
        source = f"{_FLOPS_PER_PARAMETER} for {each}"
    else:
        flops, source = parse_flops(size.flops_per_sample), "as given"
    model = ModelSize(parameters=parameters, flops_per_sample=flops)
    imagined = machines_of(wishes)
    here = _look(on, is_needed=not imagined or bool(on) or seconds is not None)
    speeds = {here.this: 1 / seconds} if here is not None and seconds is not None else {}
    cluster = add_hypothetical(_cluster(here, model, speeds), imagined, model)
    basis = f"a sample takes {format_count(flops)} FLOPs ({source})"
    if seconds is not None:
        basis = f"this machine trains a sample in {format_duration(seconds)}, as given"
    return _answer(cluster, model, profile, wishes, basis=basis)


def _run_split(size: Size, folder: Path, *, on: tuple[str, ...], wishes: PlanOptions) -> int:
    """Plan a language model that is split, from its configuration."""
    if size.parameters or size.flops_per_sample or size.seconds_per_sample:
        raise ConfigError(
            "--config says how large the model is",
            hint="Leave out --parameters, --flops-per-sample and --seconds-per-sample.",
        )
    shape = read_config(folder)
    batch = parse_count(size.batch or _SPLIT_BATCH, "--batch", "16")
    tokens = parse_count(size.tokens or _SPLIT_TOKENS, "--tokens", "1024")
    trained = shape.layers * shape.adapter_numbers
    model = ModelSize(parameters=trained, flops_per_sample=shape.block_flops(tokens))
    imagined = machines_of(wishes)
    here = _look(on, is_needed=not imagined or bool(on))
    cluster = add_hypothetical(_cluster(here, model, {}), imagined, model)
    return run_estimated(EstimatedTraining(shape, tokens, batch, size.base), cluster, wishes=wishes)


def run_measured(measured: StepProfile, *, on: tuple[str, ...], wishes: PlanOptions) -> int:
    """Plan from the measurements of a dry run."""
    state = 24.0 + measured.frozen_bytes / measured.parameters
    model = ModelSize(
        parameters=measured.parameters,
        wire_bytes=measured.gradient_bytes / measured.parameters,
        state_bytes=min(_MOST_STATE_BYTES, state),
        is_lora=measured.is_lora,
    )
    speeds: dict[str, float] = defaultdict(float)
    overheads: dict[str, float] = defaultdict(float)
    for worker in measured.workers:
        if worker.samples and worker.seconds:
            speeds[worker.node] += worker.samples / worker.seconds
            overheads[worker.node] = max(overheads[worker.node], worker.optimizer_s)
    if not speeds:
        raise RunError(
            "no worker of the dry run has computed a sample", hint="Read its output: barnraise logs RUN --all"
        )
    # One figure for all plans: that of the machine which all of them are compared with.
    fastest = max(speeds, key=lambda node: (speeds[node], node))
    profile = StepTimes(batch=measured.batch, unit=measured.unit, overhead_s=overheads[fastest])
    here = _look(on, is_needed=True)
    cluster = add_hypothetical(_cluster(here, model, speeds), machines_of(wishes), model)
    names = {member.node: member.name for member in cluster.members}
    notes = [
        f"Of {names[worker.node]} only the first step was measured; later ones are usually faster."
        for worker in measured.workers
        if worker.node in names and not worker.is_warm
    ]
    cluster = build_cluster(cluster.members, cluster.paths, (*cluster.notes, *notes))
    # Shares follow speeds within the first steps.
    settled = measured.steps_s[len(measured.steps_s) // 2 :]
    trial = PlanTrial(
        machines=tuple(sorted(names[node] for node in speeds if node in names)),
        step_s=statistics.median(settled) if settled else None,
        is_settled=len(measured.steps_s) >= _SETTLED_STEPS,
    )
    return _answer(cluster, model, profile, wishes, basis="measured with your script just now", trial=trial)


def _look(on: tuple[str, ...], *, is_needed: bool) -> _Here | None:
    """Ask the agent for machines and links; None if no agent runs and none is needed."""
    try:
        response = ask(GraphRequest(on=on), GraphResponse, offer_start=is_needed)
    except AgentError as error:
        if is_needed:
            raise AgentError(
                error.message,
                hint="Start it: barnraise up --detach; or plan with machines that you might have: "
                "barnraise plan --parameters 124M --add 4090@1gbit --add mac-m2@wifi",
            ) from error
        return None
    return _Here(decode_graph(response.graph), response.nodes, response.this)


def _cluster(here: _Here | None, model: ModelSize, speeds: Mapping[str, float]) -> PlanCluster:
    if here is None:
        return build_cluster(())
    # This machine's figures say how fast the others are, also where it takes no part.
    wanted = {*here.nodes, here.this} if here.this in speeds else set(here.nodes)
    graph = build_graph(
        (facts for facts in here.graph.nodes if facts.node in wanted), here.graph.links
    ).whole()
    cluster = cluster_from_graph(graph, model, speeds)
    cluster = without_machines(
        cluster, [member.name for member in cluster.members if member.node not in here.nodes]
    )
    if not cluster.members:
        raise RunError(
            f"these machines have not been measured yet: {', '.join(facts.name for facts in graph.nodes)}",
            hint="They are measured some seconds after their agents start, if torch is there: see "
            "`barnraise nodes`. Or give the speed of this one: --seconds-per-sample 12ms",
        )
    return cluster


def _answer(
    cluster: PlanCluster,
    model: ModelSize,
    profile: StepTimes,
    wishes: PlanOptions,
    *,
    basis: str,
    trial: PlanTrial = PlanTrial(),  # noqa: B008  # frozen
) -> int:
    options = options_of(wishes)
    ranking = make_plans(cluster, model, profile, options)
    tried = _tried(ranking, trial)
    calibration = Calibration()
    if tried is not None and trial.step_s is not None and trial.is_settled and tried.traffic is not None:
        calibration = refit(calibration, observation(tried, cluster, trial.step_s))
        ranking = make_plans(cluster, model, profile, options, calibration)
    answer = PlanReport(
        model=model,
        profile=profile,
        basis=basis,
        sync=options.sync,
        machines=cluster.members,
        links=cluster.paths,
        ranking=ranking,
        advice=advise(cluster, model, profile, options, calibration),
        together=trial.machines,
        measured_step_s=trial.step_s,
        predicted_step_s=None if tried is None else tried.step_s,
        is_calibrated=calibration != Calibration(),
    )
    if wishes.picture is not None:
        _write(wishes.picture, picture(answer))
    if wishes.as_json:
        click.echo(json.dumps(msgspec.to_builtins(answer), indent=2))
        return 0
    click.echo(describe(answer))
    if wishes.picture is not None:
        click.echo(f"\nThe picture is in {wishes.picture}.")
    return 0


def _tried(ranking: PlanRanking, trial: PlanTrial) -> Plan | None:
    """Return the best exact plan of the machines in the dry run; a session behaves much like it."""
    same = (
        plan
        for plan in ranking.plans
        if plan.is_exact and {part.name for part in plan.parts} == set(trial.machines)
    )
    return next(same, None)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--picture {path} cannot be written: {error.strerror}",
            hint="Name a file in a folder that exists, such as --picture plan.svg.",
        ) from error
