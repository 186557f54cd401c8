"""Which machines train together, how they synchronise and how fast that will be: costs and plans. Pure.

May import ``topology`` and what is below it; never torch. What links and machines can do is handed in;
nothing here measures, sends or waits.
"""

from backyard.planning.advice import Advice, advise
from backyard.planning.calibration import Calibration, Observation, refit
from backyard.planning.cluster import Cluster, Member, Path, both_ways, build_cluster, cluster_of, without
from backyard.planning.codecs import LOSSY, Codec
from backyard.planning.imagined import Imagined, imagine, with_imagined
from backyard.planning.inputs import Model, Options, StepProfile
from backyard.planning.levels import Level, Levels, read_levels
from backyard.planning.planner import make_plans
from backyard.planning.plans import Plan, Ranking, observation
from backyard.planning.watching import Replan, Watch, adopt, begin_watch, is_worth, watch

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
