"""Codecs with error feedback for gradients and pseudo-gradients, and sums over process groups that use them.

May import ``collectives`` and what is below it, torch and numpy; it needs none of ours but ``core`` so far.
"""

from barnraise.compression.allreduce import Summed, sum_over
from barnraise.compression.codec import Codec, Turn
from barnraise.compression.ddp import GradientHook, average, compress_gradients
from barnraise.compression.feedback import Encoded, ErrorFeedback, Part
from barnraise.compression.powersgd import PowerSGD
from barnraise.compression.registry import NAMES, codec_named

__all__ = [
    "NAMES",
    "Codec",
    "Encoded",
    "ErrorFeedback",
    "GradientHook",
    "Part",
    "PowerSGD",
    "Summed",
    "Turn",
    "average",
    "codec_named",
    "compress_gradients",
    "sum_over",
]
