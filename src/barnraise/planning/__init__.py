"""Planner: which machines train together, how they synchronise, and the predicted speed. Pure.

May import ``topology`` and what is below it; never torch. Measurements are inputs; nothing here measures,
sends or waits.
"""

from barnraise.planning.inputs.cluster import (
    NetworkPath,
    PlanCluster,
    PlannedMachine,
    build_cluster,
    cluster_from_graph,
    symmetric_link,
    without_machines,
)
from barnraise.planning.inputs.codecs import LOSSY, PlanCodec
from barnraise.planning.inputs.hypothetical import HypotheticalMachine, add_hypothetical, parse_machine
from barnraise.planning.inputs.inputs import ModelSize, PlanLimits, StepTimes
from barnraise.planning.inputs.levels import Level, Levels, read_levels
from barnraise.planning.plan.advice import PlanAdvice, advise
from barnraise.planning.plan.calibration import Calibration, Observation, refit
from barnraise.planning.plan.drift_monitor import (
    DriftMonitor,
    Replan,
    adopt_plan,
    is_worth_switching,
    observe_step,
    start_monitor,
)
from barnraise.planning.plan.planner import make_plans
from barnraise.planning.plan.plans import Plan, PlanRanking, observation

__all__ = [
    "LOSSY",
    "Calibration",
    "DriftMonitor",
    "HypotheticalMachine",
    "Level",
    "Levels",
    "ModelSize",
    "NetworkPath",
    "Observation",
    "Plan",
    "PlanAdvice",
    "PlanCluster",
    "PlanCodec",
    "PlanLimits",
    "PlanRanking",
    "PlannedMachine",
    "Replan",
    "StepTimes",
    "add_hypothetical",
    "adopt_plan",
    "advise",
    "build_cluster",
    "cluster_from_graph",
    "is_worth_switching",
    "make_plans",
    "observation",
    "observe_step",
    "parse_machine",
    "read_levels",
    "refit",
    "start_monitor",
    "symmetric_link",
    "without_machines",
]
