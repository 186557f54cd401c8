"""Job spec: what the owner of a job asked for, with the owner's signature. Pure.

The runs of a job carry the job's spec and its signature. So every machine can check that an owner asked for
them, also if that owner's machine is off when the coordinator starts them.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.agent_client.queue.requests import JobNumber, JobOptions
from barnraise.agent_client.run_options import MAX_MACHINES, RunOptions, RunProgram
from barnraise.core.decoding import decode
from barnraise.core.errors import RunError, TrustError
from barnraise.identity import NodeId, NodeKey, verify_signature

MAX_JOB_BYTES = 96 << 10  # a run's spec holds the program a second time
MAX_ATTEMPTS = 99
DEVICE = r"^([a-z]{1,8}(:[0-9]{1,3})?)?\Z"
_PURPOSE = b"barnraise job order 1\0"
_MAX_SLUG = 28
_LETTERS = 4


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Job spec; it never changes. ``nodes``: the machines that the user named; empty: those of all owners."""

    job: JobNumber
    by: Annotated[bytes, Meta(min_length=32, max_length=32)]
    at: Annotated[float, Meta(ge=0, le=1e12)]  # the owner's wall clock; for people only
    program: RunProgram
    options: RunOptions = RunOptions()
    job_options: JobOptions = JobOptions()
    nodes: Annotated[
        tuple[Annotated[bytes, Meta(min_length=32, max_length=32)], ...], Meta(max_length=MAX_MACHINES)
    ] = ()


class SignedJob(msgspec.Struct, frozen=True, array_like=True):
    """Encoded job spec and its owner's signature."""

    order: Annotated[bytes, Meta(max_length=MAX_JOB_BYTES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_specs = msgspec.msgpack.Decoder(JobSpec)


def sign_job(spec: JobSpec, key: NodeKey) -> SignedJob:
    """Sign a job spec; raise RunError if it is too large for the queue."""
    if spec.by != key.id.raw:
        raise RunError("a job must be signed by the machine that adds it")
    order = _encoder.encode(spec)
    if len(order) > MAX_JOB_BYTES:
        raise RunError(
            f"the command and the imports of a job have {len(order):,} bytes; {MAX_JOB_BYTES:,} are possible",
            hint="Shorten the command, for example with a file of arguments in the folder.",
        )
    return SignedJob(order, key.sign(_PURPOSE + order))


@lru_cache(maxsize=4096)  # every machine sends the same job, and each run of it contains it again
def read_job(job: SignedJob) -> JobSpec:
    """Return the spec of a job if its signature is valid; whether the signer is an owner, the trust log
    knows.
    """
    spec = decode(_specs, job.order, "the spec of a job cannot be read")
    if not verify_signature(NodeId(spec.by), job.signature, _PURPOSE + job.order):
        raise TrustError(f"the spec of job {spec.job} is not signed by the machine that it names")
    return spec


def attempt_run(spec: JobSpec, number: int) -> str:
    """Return the name of the run of an attempt. The same attempt has the same name on every coordinator.

    Its last letters follow from the time of the job. In another cluster the numbers begin again, and folders
    of earlier runs are still on the disks.
    """
    title = spec.options.title or spec.program.command[0].rpartition("/")[2].removesuffix(".py")
    return _run_name(title, spec.job, spec.at, number)


@lru_cache(maxsize=8192)  # the scheduler asks for the names of all attempts at each decision
def _run_name(title: str, job: int, at: float, number: int) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower())[:_MAX_SLUG].strip("-") or "job"
    letters = base64.b32encode(hashlib.sha256(struct.pack(">d", at)).digest()).decode()[:_LETTERS]
    return f"{slug}-q{job}-{number}-{letters.lower()}"
