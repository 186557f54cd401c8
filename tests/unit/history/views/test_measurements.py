"""Energy of a machine is the sum of all counts of its agent."""

from __future__ import annotations

import random

from barnraise.history.entries import MachineSample
from barnraise.history.views.measurements import Measurements
from benchmarks.invented_run import DESK, MAC


def test_energy_goes_on_after_the_agent_has_started_again() -> None:
    counts = [3.0, 6.0, 9.0, 2.0, 4.0, None, 1.0, 5.0]
    samples = [MachineSample(float(at), DESK, energy_j=energy) for at, energy in enumerate(counts)]
    random.Random(4).shuffle(samples)
    measurements = Measurements()
    measurements.add(samples)
    measurements.add([MachineSample(9.0, MAC, load=0.5)])
    assert measurements.newest(DESK).energy_j == 9.0 + 4.0 + 5.0
    assert measurements.newest(DESK).at == 7.0
    assert measurements.newest(MAC).energy_j is None
