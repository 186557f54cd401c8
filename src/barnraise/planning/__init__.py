"""Which machines train together, how they synchronise and how fast that will be: costs and plans. Pure.

May import ``topology`` and what is below it; never torch. What links and machines can do is handed in;
nothing here measures, sends or waits.
"""

from barnraise.planning.advice import Advice, advise
from barnraise.planning.calibration import Calibration, Observation, refit
from barnraise.planning.cluster import Cluster, Member, Path, both_ways, build_cluster, cluster_of, without
from barnraise.planning.codecs import LOSSY, Codec
from barnraise.planning.imagined import Imagined, imagine, with_imagined
from barnraise.planning.inputs import Model, Options, StepProfile
from barnraise.planning.levels import Level, Levels, read_levels
from barnraise.planning.planner import make_plans
from barnraise.planning.plans import Plan, Ranking, observation
from barnraise.planning.watching import Replan, Watch, adopt, begin_watch, is_worth, watch

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
