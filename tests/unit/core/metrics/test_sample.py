"""Samples of workers: a script may send anything, and only values of the catalogue are shown."""

from __future__ import annotations

import math

import pytest

from barnraise.core.metrics import ProcessValues, Sample
from barnraise.core.metrics.sample import accepted, is_cumulative, label_names

GOOD = [
    Sample("barnraise_steps_total", (), 3.0),
    Sample("barnraise_loss", (), math.nan),
    Sample("barnraise_step_seconds_bucket", ("0.25",), 1.0),
    Sample("barnraise_step_seconds_bucket", ("+Inf",), 1.0),
    Sample("barnraise_collective_failures_total", ("send", "peer-lost"), 1.0),
]


@pytest.mark.parametrize("sample", GOOD)
def test_values_of_the_catalogue_are_accepted(sample: Sample) -> None:
    assert accepted(ProcessValues("worker", b"x" * 8, (sample,))) == (sample,)


@pytest.mark.parametrize(
    "sample",
    [
        Sample("barnraise_unknown", (), 1.0),
        Sample("barnraise_machines", ("online",), 9.0),  # of the agent
        Sample("barnraise_wire_sent_bytes_total", (), 9.0),  # of another kind of process
        Sample("barnraise_steps_total", ("more",), 1.0),
        Sample("barnraise_steps_total", (), -1.0),
        Sample("barnraise_steps_total", (), math.inf),
        Sample("barnraise_step_seconds_bucket", ("0.3",), 1.0),
        Sample("barnraise_step_seconds_bucket", (), 1.0),
        Sample("barnraise_collective_failures_total", ("\x1b[2J", "peer-lost"), 1.0),
    ],
)
def test_other_values_are_left_out(sample: Sample) -> None:
    assert accepted(ProcessValues("worker", b"x" * 8, (sample,))) == ()


def test_label_names_have_the_bound_of_a_bucket_last() -> None:
    assert label_names("barnraise_step_seconds_bucket") == ("run", "worker", "le")
    assert label_names("barnraise_step_phase_seconds_total") == ("run", "worker", "phase")
    assert is_cumulative("barnraise_step_seconds_sum")
    assert not is_cumulative("barnraise_loss")
