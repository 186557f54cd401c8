"""Advice: predictions for another network, another setting or other machines. Pure.

Each advice compares a plan for the changed cluster with the plan that is chosen now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from barnraise.planning.inputs.cluster import PlanCluster, PlannedMachine, build_cluster, symmetric_link
from barnraise.planning.inputs.inputs import ModelSize, PlanLimits, StepTimes
from barnraise.planning.plan.calibration import Calibration
from barnraise.planning.plan.planner import make_plans
from barnraise.planning.plan.plans import PlanRanking, listed

What = Literal["switch", "cable", "leave_out", "sync", "batch", "units", "machine"]

_MIN_GAIN = 1.05
_SWITCHES = (("2.5 Gbit/s", 2350.0), ("10 Gbit/s", 9400.0))
# A LAN path below this rate is not a 1 Gbit/s cable.
_WIRED_MBPS = 500.0
_CABLE_MBPS = 940.0
_LAN_S = 0.005
_WIRED_S = 0.0002
_MAX_CABLES = 3
_FINE_MICRO_BATCHES = 64
_WAITING = 0.05


class PlanAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """One advice to the user. ``times``: the speedup in samples per second."""

    what: What
    times: float
    sentence: str


class _Case(NamedTuple):
    """Inputs of one prediction."""

    cluster: PlanCluster
    model: ModelSize
    profile: StepTimes
    options: PlanLimits
    calibration: Calibration

    def plans(self) -> PlanRanking:
        return make_plans(*self)


def advise(
    cluster: PlanCluster,
    model: ModelSize,
    profile: StepTimes,
    options: PlanLimits | None = None,
    calibration: Calibration | None = None,
) -> tuple[PlanAdvice, ...]:
    """Return the changes that would make training at least 5 % faster, the most helpful first."""
    case = _Case(cluster, model, profile, options or PlanLimits(), calibration or Calibration())
    now = case.plans()
    suggestions = [*_left_out(now)]
    for change in (*_networks(case), *_more_machines(case), *_settings(case, now)):
        plan = change.case.plans().chosen
        times = plan.samples_per_s / now.chosen.samples_per_s
        if times >= _MIN_GAIN:
            sentence = f"{change.means} would make this {times:.1f} times as fast{change.but}"
            if plan.quality.cost > now.chosen.quality.cost:
                sentence += f", at an expected cost of {plan.quality.cost:.1%} of the loss"
            suggestions.append(PlanAdvice(what=change.what, times=times, sentence=f"{sentence}."))
    return tuple(sorted(suggestions, key=lambda advice: (-advice.times, advice.sentence)))


class _Change(NamedTuple):
    """Change to try; ``means`` and ``but`` are the start and end of its sentence."""

    what: What
    case: _Case
    means: str
    but: str = ""


def _networks(case: _Case) -> Iterator[_Change]:
    for name, mbps in _SWITCHES:
        wired = {(path.source, path.target): mbps for path in case.cluster.paths if path.mbps >= _WIRED_MBPS}
        raised = _with_rates(case.cluster, wired)
        if raised != case.cluster:
            yield _Change("switch", case._replace(cluster=raised), f"A switch and ports of {name}")
    best = {
        member.name: max(
            (path.mbps for path in case.cluster.paths if path.source == member.name), default=0.0
        )
        for member in case.cluster.members
    }
    slow = sorted((rate, name) for name, rate in best.items() if 0 < rate < _WIRED_MBPS)
    for _, name in slow[:_MAX_CABLES]:
        own = (path for path in case.cluster.paths if name in (path.source, path.target))
        cable = {
            (path.source, path.target): min(
                _CABLE_MBPS, best[path.target if path.source == name else path.source]
            )
            for path in own
        }
        raised = _with_rates(case.cluster, cable)
        if raised != case.cluster:
            yield _Change("cable", case._replace(cluster=raised), f"A cable of 1 Gbit/s to {name}")


def _more_machines(case: _Case) -> Iterator[_Change]:
    """Yield a second machine like the fastest one, beside it."""
    fastest = max(case.cluster.members, key=lambda member: (member.samples_per_s, member.name))
    near = max((path.mbps for path in case.cluster.paths if path.source == fastest.name), default=_CABLE_MBPS)
    used_names = {member.name for member in case.cluster.members}
    name = next(
        name for number in range(len(used_names) + 1) if (name := f"another {number}") not in used_names
    )
    twin = msgspec.structs.replace(fastest, name=name, node="")
    paths = [*case.cluster.paths, *symmetric_link(fastest.name, name, near, _WIRED_S)]
    for path in case.cluster.paths:
        if path.source == fastest.name:
            paths.append(msgspec.structs.replace(path, source=name))
        elif path.target == fastest.name:
            paths.append(msgspec.structs.replace(path, target=name))
    changed = build_cluster((*case.cluster.members, twin), paths, case.cluster.notes)
    yield _Change("machine", case._replace(cluster=changed), f"Another machine like {fastest.name}")


def _settings(case: _Case, now: PlanRanking) -> Iterator[_Change]:
    options, profile = case.options, case.profile
    if options.sync == "exact":
        allowed = msgspec.structs.replace(options, sync="auto")
        yield _Change("sync", case._replace(options=allowed), "Sync 'auto'")
    if len(case.cluster.members) < 2:
        return
    larger = msgspec.structs.replace(profile, batch=2 * profile.batch, unit=profile.unit_size)
    yield _Change(
        "batch",
        case._replace(profile=larger),
        f"A global batch of {larger.batch} instead of {profile.batch}",
        " in samples per second; check the learning rate again then",
    )
    finer = max(1, profile.batch // _FINE_MICRO_BATCHES)
    waits = now.chosen.phases.waiting_s > _WAITING * now.chosen.step_s
    too_few = profile.batch < profile.unit_size * len(case.cluster.members)
    if finer < profile.unit_size and (waits or too_few):
        yield _Change(
            "units",
            case._replace(profile=msgspec.structs.replace(profile, unit=finer)),
            f"Micro-batches of {finer} samples instead of {profile.unit_size}",
            "; batch norms then see fewer samples at once",
        )


def _left_out(now: PlanRanking) -> Iterator[PlanAdvice]:
    """Yield the gain of leaving machines out, compared with the exact plan of all machines."""
    full_group = max((plan for plan in now.plans if plan.is_exact), key=lambda plan: len(plan.parts))
    used = {part.name for part in now.chosen.parts}
    idle = [part.name for part in full_group.parts if part.name not in used]
    times = now.chosen.samples_per_s / full_group.samples_per_s
    if idle and now.chosen.is_exact and times >= _MIN_GAIN:
        sentence = (
            f"Without {listed(idle)} it is {times:.1f} times as fast as with them; this plan leaves them out."
        )
        yield PlanAdvice(what="leave_out", times=times, sentence=sentence)


def _with_rates(cluster: PlanCluster, rates: Mapping[tuple[str, str], float]) -> PlanCluster:
    """Return the cluster with faster LAN paths, and with ports that are wide enough for them."""
    paths = []
    for path in cluster.paths:
        mbps = max(path.mbps, rates.get((path.source, path.target), 0.0))
        paths.append(msgspec.structs.replace(path, mbps=mbps) if path.latency_s <= _LAN_S else path)

    def widened(member: PlannedMachine) -> PlannedMachine:
        out = max((path.mbps for path in paths if path.source == member.name), default=0.0)
        into = max((path.mbps for path in paths if path.target == member.name), default=0.0)
        up = None if member.up_mbps is None else max(member.up_mbps, out)
        down = None if member.down_mbps is None else max(member.down_mbps, into)
        return msgspec.structs.replace(member, up_mbps=up, down_mbps=down)

    return build_cluster(map(widened, cluster.members), paths, cluster.notes)
