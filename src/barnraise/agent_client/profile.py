"""Measurements of a dry run, written for the command line. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError

DRY_RUN = "BARNRAISE_DRY_RUN"  # the environment variable that makes a session measure a few steps, and end
PROFILE_FILE = "barnraise-dry-run.json"  # in the run's folder, written by the main member
MOST_WORKERS = 1024
MOST_BLOCKS = 4096

Count = Annotated[int, Meta(ge=1, le=1 << 50)]
Size = Annotated[int, Meta(ge=0, le=1 << 60)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(ge=0, le=1e15)]
Word = Annotated[str, Meta(max_length=128)]


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: samples that it computed, in how many seconds of its own work.

    ``is_warm``: not in its first step, in which programs and devices still get ready. ``optimizer_s``: what
    applying a step takes. ``is_ready``: it has seen enough; the main member's word counts.
    """

    node: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
    device: Word
    samples: Annotated[int, Meta(ge=0, le=1 << 50)]
    seconds: Seconds
    is_warm: bool
    optimizer_s: Seconds = 0.0
    is_ready: bool = False


class StepProfile(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Measured step of a script: the model, the micro-batches, and the speed of each worker.

    ``parameters``: trained ones. ``frozen_bytes``: size of the others. ``steps_s``: seconds of the steps that
    all workers took together, after the first one.
    """

    parameters: Count
    gradient_bytes: Count
    frozen_bytes: Annotated[int, Meta(ge=0, le=1 << 60)]
    is_lora: bool
    batch: Count
    unit: Count
    workers: Annotated[tuple[MeasuredStep, ...], Meta(min_length=1, max_length=MOST_WORKERS)]
    steps_s: Annotated[tuple[Seconds, ...], Meta(max_length=1024)] = ()


class PartBytes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a part of a model, and those that a micro-batch keeps there for its backward pass."""

    frozen: Size
    trained: Size
    activations: Size = 0


class SplitWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Worker that would hold a stage, with its measured seconds for a micro-batch; 0: unknown.

    ``forward_s`` and ``backward_s``: of a block. ``before_s`` and ``after_s``: of the parts at the ends.
    ``around_s``: beside the blocks of each stage. ``memory_bytes``: for its stage. ``host_bytes``: memory of
    the computer beside that of the device. ``host_rate``: bytes per second from there.
    """

    name: Word
    memory_bytes: Size
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    before_s: Seconds = 0.0
    after_s: Seconds = 0.0
    around_s: Seconds = 0.0
    host_bytes: Size = 0
    host_rate: Rate = 0.0


class SplitProfile(msgspec.Struct, frozen=True, kw_only=True, tag="split"):
    """Measured parts of a model that is split over machines, and the links between these.

    ``boundary_bytes``: activations of a micro-batch between two blocks. ``tied_bytes``: what the parts before
    and after the blocks share. ``sent_bytes``: activations in the form in which they travel. ``batch``:
    samples of a step.
    ``rates``: bytes per second from each worker to each; 0 if unknown. ``latencies``: one way.
    """

    before: PartBytes
    blocks: Annotated[tuple[PartBytes, ...], Meta(min_length=1, max_length=MOST_BLOCKS)]
    after: PartBytes
    boundary_bytes: Size
    tied_bytes: Size = 0
    sent_bytes: Size
    batch: Count
    batches: Count
    order: Literal["1F1B", "GPipe"]
    workers: Annotated[tuple[SplitWorker, ...], Meta(min_length=1, max_length=MOST_WORKERS)]
    rates: Annotated[
        tuple[Annotated[tuple[Rate, ...], Meta(max_length=MOST_WORKERS)], ...], Meta(max_length=MOST_WORKERS)
    ]
    latencies: Annotated[
        tuple[Annotated[tuple[Seconds, ...], Meta(max_length=MOST_WORKERS)], ...],
        Meta(max_length=MOST_WORKERS),
    ]


_measured = msgspec.json.Decoder(MeasuredStep)
_profiles: msgspec.json.Decoder[StepProfile | SplitProfile] = msgspec.json.Decoder(StepProfile | SplitProfile)


def encode(message: MeasuredStep | StepProfile | SplitProfile) -> bytes:
    return msgspec.json.encode(message)


def decode_measured(data: bytes) -> MeasuredStep:
    return decode(_measured, data, "what a worker has measured cannot be read")


def decode_profile(data: bytes) -> StepProfile | SplitProfile:
    """Decode the profile of a dry run. Raise ProtocolError if it contradicts itself."""
    profile = decode(_profiles, data, "what the dry run has measured cannot be read")
    if isinstance(profile, SplitProfile):
        count = len(profile.workers)
        for table in (profile.rates, profile.latencies):
            if [len(row) for row in table] != [count] * count:
                raise ProtocolError("the dry run has measured the links of other workers than its own")
    return profile
