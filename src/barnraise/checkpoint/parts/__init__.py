"""Checkpoints in parts, which no machine holds as a whole: written, read, and exported tensor by tensor.

It may import what `checkpoint` may. Which machine writes which part is decided in `training.pipeline`.
"""

from barnraise.checkpoint.parts.merging import merge_by_layers
from barnraise.checkpoint.parts.part_files import PartFiles, WrittenParts, shared_state
from barnraise.checkpoint.parts.trained_tensors import TensorForm, TrainedTensors, write_tensors

__all__ = [
    "PartFiles",
    "TensorForm",
    "TrainedTensors",
    "WrittenParts",
    "merge_by_layers",
    "shared_state",
    "write_tensors",
]
