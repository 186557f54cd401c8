"""Which way of staying together suits the machines: the first member asks the planner while it trains.

The first steps of a group are exact. They show how fast each member computes and how long a step takes, which
calibrates the prediction. Then the plans for just these members are compared. With sync "auto" the best is
taken from a later commit on, and machines rest whom the others are clearly faster without; otherwise it is
only said what would be faster. Steps that leave the prediction for a while are a reason to plan again.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from barnraise.planning.plan.drift_monitor import FIRST_REST_S, WORTH, is_same
from barnraise.planning.plan.plans import listed
from barnraise.topology.graph import TopologyGraph, build_graph
from barnraise.training.autotune.codec_benchmark import measured as measured_codecs
from barnraise.training.sync import Sync

log = logging.getLogger("barnraise.training")

WARM = 8  # commits of a group before anything is said of it
_LONG_S = 20.0  # or as many as take so long
_AGAIN_S = 60.0
_SAID = 0.98  # of a step's time: what is faster than this alone is said
_STAY = 2  # machines at least

# Sparse gradients of single steps are only known to suit small vision models: they can be asked for.
CODECS = tuple(
    msgspec.structs.replace(codec, step_cost=1.0) if codec.gathers else codec for codec in CHOOSABLE
)

Wish = Literal["exact", "auto"]


class SyncChoice(NamedTuple):
    """``said``: what a person should know, if anything. ``rests``: machines to go on without, and why."""

    plan: Plan
    sync: Sync
    calibration: Calibration
    why: str
    said: str = ""
    rests: tuple[str, ...] = ()
    rests_why: str = ""


def choose(
    cluster: PlanCluster,
    model: ModelSize,
    profile: StepTimes,
    wish: Wish,
    calibration: Calibration,
    measured: tuple[Plan, float] | None = None,
    codecs: tuple[PlanCodec, ...] = CODECS,
    *,
    overlaps: bool = True,
    workers: int = 0,
    levels: Levels = OPEN,
) -> SyncChoice:
    """``measured``: the plan that is followed, and the seconds of a step. Without it, every step is exact.

    ``overlaps``: whether members go ahead while a round is summed. ``workers``: how many there are, at least
    one on each machine. ``levels``: what a person has fixed.
    """
    if measured is not None and len(measured[0].order) == len(cluster.members):
        calibration = refit(calibration, observation(measured[0], cluster, measured[1]))
    options = PlanLimits(
        sync=wish, is_given=True, is_flat=True, codecs=codecs, overlaps=overlaps, levels=levels
    )
    found = make_plans(cluster, model, profile, options, calibration)
    free = msgspec.structs.replace(options, is_given=False)
    best = make_plans(cluster, model, profile, free, calibration).chosen
    said = _advice(found.chosen, best)
    if levels != OPEN and len(found.chosen.order) < len(cluster.members):
        everybody = listed(sorted(one.name for one in cluster.members))
        said = f"what --levels fixes suits no plan for {everybody}: leave a part of it to auto"
    if said and wish == "exact":
        auto = make_plans(cluster, model, profile, msgspec.structs.replace(options, sync="auto"), calibration)
        if auto.chosen.score > best.score:
            said += "; or let plans change the mathematics: --sync auto"
    sync = sync_of(found.chosen, profile, workers or len(cluster.members))
    choice = SyncChoice(found.chosen, sync, calibration, found.reason, said)
    if wish != "auto" or len(cluster.members) <= _STAY:
        return choice
    company = msgspec.structs.replace(free, least_machines=_STAY)
    return _with_rest(choice, cluster, make_plans(cluster, model, profile, company, calibration).chosen)


def _with_rest(choice: SyncChoice, cluster: PlanCluster, best: Plan) -> SyncChoice:
    gain = best.score / choice.plan.score
    rests = [member for member in cluster.members if member.name not in best.order]
    if not rests or len(best.order) < _STAY or gain < WORTH:
        return choice
    them = "it" if len(rests) == 1 else "them"
    why = f"{listed(sorted(best.order))} are predicted to be {gain:.2f} times as fast without {them}"
    return choice._replace(rests=tuple(member.node for member in rests), rests_why=why)


def _advice(plan: Plan, best: Plan) -> str:
    """Whether fewer machines would be faster."""
    if len(best.order) >= len(plan.order) or best.step_s > _SAID * plan.step_s:
        return ""
    together = " alone" if len(best.order) == 1 else ""
    return (
        f"{listed(sorted(best.order))}{together} would be {plan.step_s / best.step_s:.2f} times as fast as "
        f"these {len(plan.order)} machines together: barnraise run --on {','.join(sorted(best.order))} ..."
    )


def sync_of(plan: Plan, profile: StepTimes, workers: int) -> Sync:
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
    """A commit, as the chooser needs it."""

    generation: int
    sync: Sync
    speeds: tuple[float, ...]  # by rank; empty: not known yet
    nodes: tuple[str, ...]  # machines by rank
    step_s: float  # since the commit before, for each batch


class SyncTuner:
    """Of one member; only the first one's words are heard. Planning has a thread of its own."""

    def __init__(
        self,
        survey: Callable[[], TopologyGraph],
        model: ModelSize,
        profile: StepTimes,
        wish: Wish,
        want: Callable[[Sync], None],
        rest: Callable[[Sequence[str], str], None],
        *,
        overlaps: bool = True,
        levels: Levels = OPEN,
    ) -> None:
        self._overlaps, self._levels = overlaps, levels
        self._survey, self._model, self._profile = survey, model, profile
        self._wish, self._want, self._rest = wish, want, rest
        self._known: frozenset[str] = frozenset()
        self._generation = -1
        self._steps: deque[float] = deque(maxlen=WARM)
        self._plan: Plan | None = None  # that is followed, or about to be
        self._sync = Sync()
        self._watch: DriftMonitor | None = None
        self._calibration = Calibration()
        self._thread: threading.Thread | None = None
        self._not_before = 0.0  # planning did not work, and is not tried again so soon
        self._said = ""
        self._alone_since: float | None = None
        self._codecs: tuple[PlanCodec, ...] = ()

    def note(self, seen: GroupSample) -> None:
        """After each commit."""
        if seen.generation != self._generation or seen.sync != self._sync:
            if seen.generation != self._generation:
                self._not_before, self._alone_since = 0.0, None
            self._generation, self._sync = seen.generation, seen.sync
            self._steps.clear()
            return  # what came before belongs to another group
        self._steps.append(seen.step_s)
        now = time.monotonic()
        if len(set(seen.nodes)) == 1:
            self._stay_alone(seen, now)
            return
        is_busy = self._thread is not None and self._thread.is_alive()
        if is_busy or now < self._not_before or not seen.speeds:
            return
        if self._plan is None or frozenset(seen.nodes) != self._known:
            if len(self._steps) >= WARM or (len(self._steps) > 1 and sum(self._steps) > _LONG_S):
                self._begin(seen, statistics.median(self._steps), is_first=True)
        elif self._watch is not None:
            self._watch, proposal, _ = observe_step(self._watch, seen.step_s, now)
            if proposal is not None:
                self._begin(seen, proposal.measured_s, is_first=False)

    def _stay_alone(self, seen: GroupSample, now: float) -> None:
        """For one machine exact steps cost nothing. But who left may be back soon, and changes cost."""
        if self._alone_since is None:
            self._alone_since = now
        if self._wish == "auto" and seen.sync != Sync() and now - self._alone_since > FIRST_REST_S:
            self._plan, self._known = None, frozenset()
            self._want(Sync())

    def _begin(self, seen: GroupSample, step_s: float, *, is_first: bool) -> None:
        self._known = frozenset(seen.nodes)
        self._thread = threading.Thread(
            target=self._plan_again, args=(seen, step_s, is_first), name="barnraise-plan", daemon=True
        )
        self._thread.start()

    def _plan_again(self, seen: GroupSample, step_s: float, is_first: bool) -> None:
        try:
            cluster = cluster_at(self._survey(), self._model, seen.nodes, seen.speeds)
            workers = len(seen.nodes)
            current = self._plan
            if is_first or current is None:
                exact = PlanLimits(is_given=True, is_flat=True, levels=self._levels.exact())
                current = make_plans(cluster, self._model, self._profile, exact, self._calibration).chosen
            is_followed = seen.sync == sync_of(current, self._profile, workers)
            if self._wish == "auto" and not self._codecs:
                self._codecs = measured_codecs(CODECS)
            found = choose(
                cluster,
                self._model,
                self._profile,
                self._wish,
                self._calibration,
                (current, step_s) if is_followed else None,
                self._codecs or CODECS,
                overlaps=self._overlaps,
                workers=workers,
                levels=self._levels,
            )
            if is_followed and not is_first:
                found = _unless_worth_it(found, current, step_s, seen.sync)
        except Exception as error:  # noqa: BLE001  # whatever it is, training goes on as it is
            self._give_up(error)
            return
        self._calibration = found.calibration
        if self._watch is None:
            self._watch = start_monitor(found.plan)
        elif is_first or found.sync != seen.sync:
            self._watch = adopt_plan(self._watch, found.plan)
        self._plan = found.plan
        log.log(logging.INFO if found.sync == seen.sync else logging.WARNING, "plan: %s", found.why)
        if found.said:
            log.warning("%s", found.said)
        if not found.rests:
            self._want(found.sync)
        elif seen.generation == self._generation:
            self._rest(found.rests, found.rests_why)  # what suits those who stay, they will see

    def _give_up(self, error: Exception) -> None:
        self._not_before = time.monotonic() + _AGAIN_S
        said = f"{error.message} {error.hint}" if isinstance(error, BarnraiseError) else repr(error)
        if said != self._said:
            self._said = said
            log.warning("nothing is planned for this group: %s", said)


def _unless_worth_it(found: SyncChoice, current: Plan, step_s: float, sync: Sync) -> SyncChoice:
    """What is followed stays, unless another plan is clearly better: each change costs what was learnt."""
    is_better, why = is_worth_switching(current, found.plan, step_s)
    if is_better:
        return found._replace(why=why)
    same = is_same(current, found.plan)
    return found._replace(plan=found.plan if same else current, sync=sync, why=why)


def cluster_at(
    graph: TopologyGraph, model: ModelSize, nodes: Sequence[str], speeds: Sequence[float]
) -> PlanCluster:
    """The members' machines as a cluster; of several workers on one machine, the speeds add up."""
    together: dict[str, float] = {}
    for node, speed in zip(nodes, speeds, strict=True):
        together[node] = together.get(node, 0.0) + speed
    facts = [one for one in graph.nodes if one.node in together]
    if len(facts) < len(together):
        raise RunError(
            "not all of its machines have been measured yet",
            hint="`barnraise status --measure` measures them.",
        )
    return cluster_from_graph(build_graph(facts, graph.links).whole(), model, together)
