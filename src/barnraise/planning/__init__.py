"""Which machines train together, how they synchronise and how fast that will be: costs and plans. Pure.

May import ``topology`` and what is below it; never torch. What links and machines can do is handed in;
nothing here measures, sends or waits.
"""

from barnraise.planning.inputs.cluster import (
    NetworkPath,
    PlanCluster,
    PlannedMachine,
    both_ways,
    build_cluster,
    cluster_of,
    without,
)
from barnraise.planning.inputs.codecs import LOSSY, PlanCodec
from barnraise.planning.inputs.hypothetical import HypotheticalMachine, imagine, with_imagined
from barnraise.planning.inputs.inputs import ModelSize, PlanLimits, StepTimes
from barnraise.planning.inputs.levels import Level, Levels, read_levels
from barnraise.planning.plan.advice import PlanAdvice, advise
from barnraise.planning.plan.calibration import Calibration, Observation, refit
from barnraise.planning.plan.drift_monitor import DriftMonitor, Replan, adopt, begin_watch, is_worth, watch
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
    "adopt",
    "advise",
    "begin_watch",
    "both_ways",
    "build_cluster",
    "cluster_of",
    "imagine",
    "is_worth",
    "make_plans",
    "observation",
    "read_levels",
    "refit",
    "watch",
    "with_imagined",
    "without",
]
