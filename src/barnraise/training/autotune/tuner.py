"""Tuner of the synchronization: rank 0 asks the planner, while it trains, how workers should synchronize.

The first steps of a group are exact. They show each worker's speed and the duration of a step, which
calibrates the prediction. Then the plans for these workers are compared. With sync "auto" the best one is
applied at a later commit, and machines that slow the group down are paused. Otherwise only log what would be
faster. If steps deviate from the prediction for a while, plan again.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from barnraise.core.errors import BarnraiseError, RunError
from barnraise.planning import (
    Calibration,
    DriftMonitor,
    Levels,
    ModelSize,
    Plan,
    PlanCluster,
    PlanCodec,
    PlanLimits,
    StepTimes,
    adopt_plan,
    cluster_from_graph,
    is_worth_switching,
    make_plans,
    observation,
    observe_step,
    refit,
    start_monitor,
)
from barnraise.planning.inputs.codecs import CHOOSABLE
from barnraise.planning.inputs.levels import OPEN
from barnraise.planning.plan.drift_monitor import FIRST_PAUSE_S, MIN_GAIN, is_same
from barnraise.planning.plan.plans import listed
from barnraise.topology.graph import TopologyGraph, build_graph
from barnraise.training.autotune.codec_benchmark import measure_codecs
from barnraise.training.sync import Sync

log = logging.getLogger("barnraise.training")

WARM = 8  # commits of a group before it is judged
_LONG_S = 20.0  # or fewer commits that take this long
_RETRY_S = 60.0
_ADVICE_BELOW = 0.98  # of a step's time: only plans faster than this are advised
_MIN_MACHINES = 2

# Sparse gradients of single steps are only known to work for small vision models; users can ask for them.
CODECS = tuple(
    msgspec.structs.replace(codec, step_cost=1.0) if codec.gathers else codec for codec in CHOOSABLE
)

SyncMode = Literal["exact", "auto"]


class SyncChoice(NamedTuple):
    """A plan with its settings. ``advice``: text for the user, if any. ``paused``: machines to pause."""

    plan: Plan
    sync: Sync
    calibration: Calibration
    why: str
    advice: str = ""
    paused: tuple[str, ...] = ()
    pause_reason: str = ""


def choose(
    cluster: PlanCluster,
    model: ModelSize,
    profile: StepTimes,
    mode: SyncMode,
    calibration: Calibration,
    measured: tuple[Plan, float] | None = None,
    codecs: tuple[PlanCodec, ...] = CODECS,
    *,
    overlaps: bool = True,
    workers: int = 0,
    levels: Levels = OPEN,
) -> SyncChoice:
    """Choose the best plan; ``measured``: the current plan and its seconds per step.

    ``overlaps``: workers compute while a round is all-reduced. ``workers``: their number, at least one per
    machine. ``levels``: choices that the user has fixed.
    """
    if measured is not None and len(measured[0].order) == len(cluster.members):
        calibration = refit(calibration, observation(measured[0], cluster, measured[1]))
    options = PlanLimits(
        sync=mode, is_given=True, is_flat=True, codecs=codecs, overlaps=overlaps, levels=levels
    )
    plans = make_plans(cluster, model, profile, options, calibration)
    free = msgspec.structs.replace(options, is_given=False)
    best = make_plans(cluster, model, profile, free, calibration).chosen
    text = _advice(plans.chosen, best)
    if levels != OPEN and len(plans.chosen.order) < len(cluster.members):
        names = listed(sorted(member.name for member in cluster.members))
        text = f"no plan for {names} fits what --levels fixes: leave a part of it to auto"
    if text and mode == "exact":
        auto = make_plans(cluster, model, profile, msgspec.structs.replace(options, sync="auto"), calibration)
        if auto.chosen.score > best.score:
            text += "; or allow lossy plans (compressed gradients, local steps): --sync auto"
    sync = sync_of(plans.chosen, profile, workers or len(cluster.members))
    choice = SyncChoice(plans.chosen, sync, calibration, plans.reason, text)
    if mode != "auto" or len(cluster.members) <= _MIN_MACHINES:
        return choice
    limited = msgspec.structs.replace(free, least_machines=_MIN_MACHINES)
    return _with_pause(choice, cluster, make_plans(cluster, model, profile, limited, calibration).chosen)


def _with_pause(choice: SyncChoice, cluster: PlanCluster, best: Plan) -> SyncChoice:
    """Add the machines to pause, if the others are clearly faster without them."""
    gain = best.score / choice.plan.score
    paused = [member for member in cluster.members if member.name not in best.order]
    if not paused or len(best.order) < _MIN_MACHINES or gain < MIN_GAIN:
        return choice
    them = "it" if len(paused) == 1 else "them"
    why = f"{listed(sorted(best.order))} are predicted to be {gain:.2f} times as fast without {them}"
    return choice._replace(paused=tuple(member.node for member in paused), pause_reason=why)


def _advice(plan: Plan, best: Plan) -> str:
    """Return advice if fewer machines would be faster, else an empty text."""
    if len(best.order) >= len(plan.order) or best.step_s > _ADVICE_BELOW * plan.step_s:
        return ""
    together = " alone" if len(best.order) == 1 else ""
    return (
        f"{listed(sorted(best.order))}{together} would be {plan.step_s / best.step_s:.2f} times as fast as "
        f"these {len(plan.order)} machines together: barnraise run --on {','.join(sorted(best.order))} ..."
    )


def sync_of(plan: Plan, profile: StepTimes, workers: int) -> Sync:
    """Return the settings of a plan."""
    if plan.outer is None:
        return Sync(codec=plan.codec)
    return Sync(
        period=plan.period,
        codec=plan.codec,
        inner=max(1, profile.batch // workers),
        rate=plan.outer.learning_rate,
        momentum=plan.outer.momentum,
        decay=plan.outer.error_feedback or 1.0,
    )


class GroupSample(NamedTuple):
    """Measurements at one commit, as the tuner needs them."""

    generation: int
    sync: Sync
    speeds: tuple[float, ...]  # by rank; empty: not known yet
    nodes: tuple[str, ...]  # machines by rank
    step_s: float  # since the commit before, for each batch


class SyncTuner:
    """Tuner of one worker; only rank 0's requests have an effect. Planning runs in a thread."""

    def __init__(
        self,
        survey: Callable[[], TopologyGraph],
        model: ModelSize,
        profile: StepTimes,
        mode: SyncMode,
        request_sync: Callable[[Sync], None],
        request_pause: Callable[[Sequence[str], str], None],
        *,
        overlaps: bool = True,
        levels: Levels = OPEN,
    ) -> None:
        self._overlaps, self._levels = overlaps, levels
        self._survey, self._model, self._profile = survey, model, profile
        self._mode, self._request_sync, self._request_pause = mode, request_sync, request_pause
        self._known: frozenset[str] = frozenset()
        self._generation = -1
        self._steps: deque[float] = deque(maxlen=WARM)
        self._plan: Plan | None = None  # the current one, or the one about to be applied
        self._sync = Sync()
        self._watch: DriftMonitor | None = None
        self._calibration = Calibration()
        self._thread: threading.Thread | None = None
        self._not_before = 0.0  # planning failed, and is not retried earlier
        self._last_error = ""
        self._alone_since: float | None = None
        self._codecs: tuple[PlanCodec, ...] = ()
        # Called with each new plan, and the node of each machine by its name; on a thread.
        self.on_plan: Callable[[SyncChoice, Mapping[str, str]], None] = lambda choice, nodes: None

    def observe(self, sample: GroupSample) -> None:
        """Take a sample after each commit, and plan when there is a reason to."""
        if sample.generation != self._generation or sample.sync != self._sync:
            if sample.generation != self._generation:
                self._not_before, self._alone_since = 0.0, None
            self._generation, self._sync = sample.generation, sample.sync
            self._steps.clear()
            return  # earlier samples belong to another group
        self._steps.append(sample.step_s)
        now = time.monotonic()
        if len(set(sample.nodes)) == 1:
            self._return_to_exact(sample, now)
            return
        is_busy = self._thread is not None and self._thread.is_alive()
        if is_busy or now < self._not_before or not sample.speeds:
            return
        if self._plan is None or frozenset(sample.nodes) != self._known:
            if len(self._steps) >= WARM or (len(self._steps) > 1 and sum(self._steps) > _LONG_S):
                self._start_planning(sample, statistics.median(self._steps), is_first=True)
        elif self._watch is not None:
            self._watch, proposal, _ = observe_step(self._watch, sample.step_s, now)
            if proposal is not None:
                self._start_planning(sample, proposal.measured_s, is_first=False)

    def _return_to_exact(self, sample: GroupSample, now: float) -> None:
        """Request exact steps for a single machine, but only after a while: other machines may return."""
        if self._alone_since is None:
            self._alone_since = now
        if self._mode == "auto" and sample.sync != Sync() and now - self._alone_since > FIRST_PAUSE_S:
            self._plan, self._known = None, frozenset()
            self._request_sync(Sync())

    def _start_planning(self, sample: GroupSample, step_s: float, *, is_first: bool) -> None:
        self._known = frozenset(sample.nodes)
        self._thread = threading.Thread(
            target=self._plan_again, args=(sample, step_s, is_first), name="barnraise-plan", daemon=True
        )
        self._thread.start()

    def _plan_again(self, sample: GroupSample, step_s: float, is_first: bool) -> None:
        """Plan on a thread, and request the result."""
        try:
            cluster = cluster_of_group(self._survey(), self._model, sample.nodes, sample.speeds)
            workers = len(sample.nodes)
            current = self._plan
            if is_first or current is None:
                exact = PlanLimits(is_given=True, is_flat=True, levels=self._levels.exact())
                current = make_plans(cluster, self._model, self._profile, exact, self._calibration).chosen
            is_followed = sample.sync == sync_of(current, self._profile, workers)
            if self._mode == "auto" and not self._codecs:
                self._codecs = measure_codecs(CODECS)
            choice = choose(
                cluster,
                self._model,
                self._profile,
                self._mode,
                self._calibration,
                (current, step_s) if is_followed else None,
                self._codecs or CODECS,
                overlaps=self._overlaps,
                workers=workers,
                levels=self._levels,
            )
            if is_followed and not is_first:
                choice = _keep_unless_better(choice, current, step_s, sample.sync)
        except Exception as error:  # noqa: BLE001  # training continues without a new plan
            self._give_up(error)
            return
        self._calibration = choice.calibration
        if self._watch is None:
            self._watch = start_monitor(choice.plan)
        elif is_first or choice.sync != sample.sync:
            self._watch = adopt_plan(self._watch, choice.plan)
        if is_first or self._plan is None or not is_same(self._plan, choice.plan):
            self.on_plan(choice, {member.name: member.node for member in cluster.members})
        self._plan = choice.plan
        log.log(logging.INFO if choice.sync == sample.sync else logging.WARNING, "plan: %s", choice.why)
        if choice.advice:
            log.warning("%s", choice.advice)
        if not choice.paused:
            self._request_sync(choice.sync)
        elif sample.generation == self._generation:
            self._request_pause(choice.paused, choice.pause_reason)  # the smaller group plans for itself

    def _give_up(self, error: Exception) -> None:
        self._not_before = time.monotonic() + _RETRY_S
        text = f"{error.message} {error.hint}" if isinstance(error, BarnraiseError) else repr(error)
        if text != self._last_error:
            self._last_error = text
            log.warning("no plan could be made for this group: %s", text)


def _keep_unless_better(choice: SyncChoice, current: Plan, step_s: float, sync: Sync) -> SyncChoice:
    """Keep the current plan unless another one is clearly better, because each change has a cost."""
    is_better, why = is_worth_switching(current, choice.plan, step_s)
    if is_better:
        return choice._replace(why=why)
    same = is_same(current, choice.plan)
    return choice._replace(plan=choice.plan if same else current, sync=sync, why=why)


def cluster_of_group(
    graph: TopologyGraph, model: ModelSize, nodes: Sequence[str], speeds: Sequence[float]
) -> PlanCluster:
    """Return the machines of a group as a cluster; speeds of workers on one machine are added."""
    together: dict[str, float] = {}
    for node, speed in zip(nodes, speeds, strict=True):
        together[node] = together.get(node, 0.0) + speed
    facts = [machine for machine in graph.nodes if machine.node in together]
    if len(facts) < len(together):
        raise RunError(
            "not all machines of the group have been measured yet",
            hint="Run `barnraise status --measure`.",
        )
    return cluster_from_graph(build_graph(facts, graph.links).whole(), model, together)
