"""Signed jobs, and the runs that follow from them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from barnraise.agent_client.queue.requests import JobOptions
from barnraise.agent_client.run_options import RunOptions
from barnraise.core.errors import BarnraiseError, RunError, TrustError
from barnraise.identity import NodeKey
from barnraise.runs.queue import spec as spec_module
from barnraise.runs.queue.spec import SignedJob, attempt_run, read_job, sign_job
from barnraise.runs.record import MAX_RESUMED, RunSpec, attempt_spec, read_spec, sign_attempt, sign_spec
from tests.unit.runs.queue.test_job import KEY, job

NODE = bytes([1]) * 32


def test_attempt_of_a_signed_job_is_a_valid_run() -> None:
    signed = job(7).record.signed
    spec = attempt_spec(signed, 3, (NODE,), "cuda:1", at=12.0)
    assert (spec.run, spec.by, spec.nodes, spec.device) == ("train-q7-3-v5kx", KEY.id.raw, (NODE,), "cuda:1")
    assert spec.resumes == ("train-q7-2-v5kx", "train-q7-1-v5kx")
    assert spec.options.per_node == 1
    assert read_spec(sign_attempt(spec, signed)) == spec


def test_attempt_on_a_machine_has_as_many_workers_as_asked_for() -> None:
    signed = job(7, each="machine").record.signed
    spec = attempt_spec(signed, 1, (NODE,), "")
    assert spec.options.per_node == 0
    assert read_spec(sign_attempt(spec, signed)) == spec


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "train-q8-3-v5kx"},
        {"run": "train-q7-0-v5kx"},
        {"run": "train-q7-100-v5kx"},
        {"run": "train-q7-²-v5kx"},
        {"run": "train-q7-3"},
        {"run": "train-q7-3-abcd"},
        {"resumes": ("another-run",)},
        {"options": RunOptions(title="train", per_node=1, container="evil")},
        {"device": ""},
        {"by": NODE},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_run_that_differs_from_its_job_is_rejected(changes: dict[str, object]) -> None:
    signed = job(7).record.signed
    spec = replace(attempt_spec(signed, 3, (NODE,), "cuda:1"), **changes)
    with pytest.raises(BarnraiseError):
        read_spec(sign_attempt(spec, signed))


def test_program_of_a_job_cannot_be_exchanged() -> None:
    signed = job(7).record.signed
    spec = attempt_spec(signed, 1, (NODE,), "cpu")
    other = replace(spec, program=replace(spec.program, command=("evil.py",)))
    with pytest.raises(TrustError, match="is not what job 7 allows"):
        read_spec(sign_attempt(other, signed))


def test_signature_of_another_key_is_rejected() -> None:
    signed = job(7).record.signed
    forged = SignedJob(signed.order, NodeKey.generate().sign(signed.order))
    with pytest.raises(TrustError, match="job 7 is not signed"):
        read_job(forged)
    with pytest.raises(TrustError, match="job 7 is not signed"):
        read_spec(sign_attempt(attempt_spec(signed, 1, (NODE,), "cpu"), forged))


def test_signature_is_checked_once_for_equal_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    signed = job(7).record.signed
    first = read_job(signed)
    monkeypatch.setattr(spec_module, "verify_signature", None)
    assert read_job(SignedJob(bytes(signed.order), bytes(signed.signature))) is first


def test_signature_of_a_run_is_none_of_a_job() -> None:
    spec: RunSpec = attempt_spec(job(7).record.signed, 1, (NODE,), "cpu")
    with pytest.raises(TrustError):
        read_spec(sign_spec(spec, KEY))


def test_only_the_owner_signs_and_large_jobs_are_refused() -> None:
    spec = job(1).spec
    with pytest.raises(RunError, match="must be signed by the machine"):
        sign_job(spec, NodeKey.generate())
    large = replace(spec, program=replace(spec.program, command=tuple("x" * 30_000 for _ in range(4))))
    with pytest.raises(RunError, match="bytes; 98,304 are possible"):
        sign_job(large, KEY)


def test_names_of_runs_are_short_and_continue_a_few_earlier_ones() -> None:
    spec = replace(job(2**31).spec, options=RunOptions(title="Über " + "x" * 90), job_options=JobOptions())
    assert len(attempt_run(spec, 99)) <= 48
    signed = job(3).record.signed
    assert len(attempt_spec(signed, 40, (NODE,), "cpu").resumes) == MAX_RESUMED


def test_jobs_of_two_clusters_with_the_same_number_have_different_runs() -> None:
    """Folders of the earlier cluster stay on the disks: a job must not continue from those."""
    first = job(1).spec
    assert attempt_run(first, 1) == attempt_run(first, 1)
    assert attempt_run(first, 1) != attempt_run(replace(first, at=1.0), 1)
