"""Which machines train together, how they synchronise and how fast that will be: costs and plans. Pure.

May import ``topology`` and what is below it; never torch. What links and machines can do is handed in;
nothing here measures, sends or waits.
"""

from barnraise.planning.inputs.cluster import (
    Cluster,
    Member,
    Path,
    both_ways,
    build_cluster,
    cluster_of,
    without,
)
from barnraise.planning.inputs.codecs import LOSSY, Codec
from barnraise.planning.inputs.hypothetical import Imagined, imagine, with_imagined
from barnraise.planning.inputs.inputs import Model, Options, StepProfile
from barnraise.planning.inputs.levels import Level, Levels, read_levels
from barnraise.planning.plan.advice import Advice, advise
from barnraise.planning.plan.calibration import Calibration, Observation, refit
from barnraise.planning.plan.drift_monitor import Replan, Watch, adopt, begin_watch, is_worth, watch
from barnraise.planning.plan.planner import make_plans
from barnraise.planning.plan.plans import Plan, Ranking, observation

__all__ = [
    "LOSSY",
    "Advice",
    "Calibration",
    "Cluster",
    "Codec",
    "Imagined",
    "Level",
    "Levels",
    "Member",
    "Model",
    "Observation",
    "Options",
    "Path",
    "Plan",
    "Ranking",
    "Replan",
    "StepProfile",
    "Watch",
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
