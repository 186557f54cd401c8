"""Benchmark of codecs on this machine."""

from __future__ import annotations

from barnraise.planning import LOSSY
from barnraise.training.autotune.codec_benchmark import measure_codecs


def test_codec_benchmark_changes_only_speeds() -> None:
    measured = measure_codecs(LOSSY)
    assert [codec.name for codec in measured] == [codec.name for codec in LOSSY]
    for before, after in zip(LOSSY, measured, strict=True):
        assert after.mb_per_s is not None
        assert 1.0 < after.mb_per_s < 1e6
        assert (after.mb_per_s == before.mb_per_s) == (after.name == "powersgd")  # its work has another form
        assert after.bytes_per_parameter == before.bytes_per_parameter
