"""Leases as a session trains them: the size of a step and the factor of the learning rate."""

from __future__ import annotations

import pytest

from barnraise.hub.protocol.messages import Lease, SampleSpan, decode_message
from barnraise.training.hub.parameter_server import LeasedWork, SampleRange
from barnraise.worker.hub_adapter import leased_work

LEASE = Lease(
    id="0" * 32,
    version=3,
    spans=(SampleSpan(0, 8, 24),),
    steps=2,
    seconds=30.0,
    void_s=120.0,
    covered=96,
    members=4,
)


@pytest.mark.parametrize(("is_linear", "members", "factor"), [(False, 4, 1.0), (True, 1, 4.0)])
def test_members_divide_batch_or_multiply_learning_rate(is_linear: bool, members: int, factor: float) -> None:
    work = leased_work(LEASE, is_linear=is_linear)
    assert work.spans == (SampleRange(0, 8, 24),)
    assert (work.covered, work.members, work.rate_factor) == (96, members, factor)
    assert decode_message(Lease, work.token) == LEASE


def test_no_lease_ends_the_training() -> None:
    assert leased_work(None, is_linear=True) == LeasedWork((), 0, 1)
