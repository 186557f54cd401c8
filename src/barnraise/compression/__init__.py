"""Lossy gradient codecs with error feedback, and all-reduces over process groups that use them.

May import ``collectives`` and packages below it, torch and numpy. Today it uses only ``core`` of ours.
"""

from barnraise.compression.allreduce.allreduce import AllReduceResult, sum_over
from barnraise.compression.allreduce.ddp_hook import GradientHook, average, compress_gradients
from barnraise.compression.allreduce.error_feedback import Encoded, ErrorFeedback, FeedbackPart
from barnraise.compression.codecs.codec import Codec, CodecRound
from barnraise.compression.codecs.powersgd import PowerSGD
from barnraise.compression.codecs.registry import NAMES, codec_named

__all__ = [
    "NAMES",
    "AllReduceResult",
    "Codec",
    "CodecRound",
    "Encoded",
    "ErrorFeedback",
    "FeedbackPart",
    "GradientHook",
    "PowerSGD",
    "average",
    "codec_named",
    "compress_gradients",
    "sum_over",
]
