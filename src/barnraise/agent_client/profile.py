"""Measurements of a dry run, written for the command line. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode

DRY_RUN = "BARNRAISE_DRY_RUN"  # the environment variable that makes a session measure a few steps, and end
PROFILE_FILE = "barnraise-dry-run.json"  # in the run's folder, written by the main member
MOST_WORKERS = 1024

Count = Annotated[int, Meta(ge=1, le=1 << 50)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
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


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
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


_measured = msgspec.json.Decoder(MeasuredStep)
_profiles = msgspec.json.Decoder(StepProfile)


def encode(message: MeasuredStep | StepProfile) -> bytes:
    return msgspec.json.encode(message)


def decode_measured(data: bytes) -> MeasuredStep:
    return decode(_measured, data, "what a worker has measured cannot be read")


def decode_profile(data: bytes) -> StepProfile:
    return decode(_profiles, data, "what the dry run has measured cannot be read")
