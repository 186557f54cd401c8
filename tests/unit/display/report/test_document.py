"""Report of the invented run: true, whole, and safe with hostile names and values."""

from __future__ import annotations

import re

import msgspec
import pytest

from barnraise.core.errors import ConfigError
from barnraise.display.report.accounting import machine_uses, step_sentences, time_parts
from barnraise.display.report.document import ReportOptions, build_report
from barnraise.display.report.energy import EnergyPrice, energy_sentences, parse_price
from barnraise.history.view import RunView, StartView
from barnraise.history.view_builder import build_view
from tests.unit.display.hostile_run import hostile_run, html_tags
from tests.unit.history.example_run import BATCH, RUN, START, STEPS, example_run

VIEW = build_view(example_run(), run=RUN)
OPTIONS = ReportOptions(EnergyPrice(0.3, "EUR"), made_at=START, version="0.1.0")
_KNOWN = """
html head meta title style body main section h1 h2 h3 p dl div dt dd figure figcaption table caption thead
tbody tr th td pre footer svg g line path text rect circle polyline polygon
"""
TAGS = set(_KNOWN.split())
_KNOWN_NAMES = """
charset http-equiv content name lang class scope data-name viewbox width height role aria-label x y x1 x2 y1
y2 cx cy r rx d points transform text-anchor stroke-width
"""
ATTRIBUTES = set(_KNOWN_NAMES.split())


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text.partition("</style>")[2]))


def test_report_of_ended_run_says_what_happened() -> None:
    words = _words(build_report(VIEW, OPTIONS))
    for part in (
        "Finished after 600 steps in 18 min",
        "started 2026-09-21 14:13:20 UTC from desk",
        "nas is paused: its link slows the others",
        "mac died: its worker was killed by signal 9",
        "600 steps count, each exactly once. They contain 115,200 samples.",
        "A step has 192 samples; 600 × 192 = 115,200, as many.",
        "mac died at step 320 and came back at step 410. No step that counts was lost.",
        "No committed step was lost.",
        "exact gradients in a ring, every step",
        "barnraise run train.py --epochs 3",
        "torch 2.13.0",
        "NVIDIA GeForce RTX 3090",
        "Estimated cost: about 0.033 EUR, at 0.3 EUR for a kilowatt-hour.",
    ):
        assert part in words


def test_report_needs_no_other_file_and_no_script() -> None:
    text = build_report(VIEW, OPTIONS)
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href|url|@import)\s*[=(]", text)
    assert len(text) < 200_000


@pytest.mark.parametrize("last", [0, 1, 100, 330, STEPS])
def test_report_of_unfinished_run_says_so(last: int) -> None:
    words = _words(build_report(build_view(example_run(last), run=RUN), OPTIONS))
    assert ("The run has not ended" in words) == (last < STEPS)


def test_hostile_names_and_values_stay_text() -> None:
    view = build_view(hostile_run(), run="<script>alert(3)</script>")
    text = build_report(view, OPTIONS)
    tags = html_tags(text)
    assert {tag for tag, _ in tags} <= TAGS
    assert {name for _, names in tags for name in names} <= ATTRIBUTES
    assert not set(text) & {"\x1b", "\u202e"}
    assert len(text) < 1_500_000
    assert "more changes are not shown" in text


def test_report_of_nothing_says_what_is_not_known() -> None:
    empty = RunView(run="r", state="failed", headline="failed", start=StartView(), started_at=None)
    words = _words(build_report(empty, ReportOptions()))
    for part in (
        "The run failed: no reason is known",
        "The script logged no value",
        "The times of the steps were not measured.",
        "The power was not measured on any machine",
        "No checkpoint was recorded.",
        "No plan was recorded.",
        "The command was not recorded.",
        "The versions of the software were not recorded.",
    ):
        assert part in words


def test_parts_of_the_time_sum_up_to_the_run() -> None:
    parts = dict(time_parts(VIEW))
    assert sum(parts.values()) == pytest.approx(VIEW.elapsed_s)
    assert parts["waiting"] == pytest.approx(18, abs=0.5), "three breaks of six seconds"
    assert parts["before the first step"] == pytest.approx(40, abs=0.5)
    assert parts["after the last step"] == pytest.approx(2, abs=0.5)
    assert "dropped steps and restarts" not in parts
    assert parts["compute"] > parts["communication"] > parts["vote"] > 0


def test_use_of_machines_counts_the_time_of_training() -> None:
    desk, mac, nas = machine_uses(VIEW)
    assert desk.trained_part == pytest.approx(1021 / 1063, abs=0.01)
    assert 0 < nas.trained_s < mac.trained_s < desk.trained_s
    assert nas.highest_c is None
    assert desk.highest_c == pytest.approx(71, abs=0.5)


def test_missing_and_dropped_steps_are_named() -> None:
    view = msgspec.structs.replace(VIEW, missing=3, rolled_back=20, samples=(STEPS - 3) * BATCH, first_step=0)
    text = " ".join(step_sentences(view))
    assert "3 steps of them have no entry in any log" in text
    assert "20 steps were computed and then dropped" in text
    assert "597 × 192 = 114,624, as many" in text


def test_run_without_a_step_says_so() -> None:
    assert step_sentences(build_view(example_run(0)))[0] == "No step was committed."


def test_wrong_number_of_samples_is_not_hidden() -> None:
    view = msgspec.structs.replace(VIEW, samples=VIEW.samples + 1)
    assert "600 × 192 = 115,200, not 115,201" in " ".join(step_sentences(view))


def test_energy_of_silent_machine_is_named() -> None:
    desk, mac, nas = VIEW.machines
    machines = (desk, mac, msgspec.structs.replace(nas, energy_j=None))
    view = msgspec.structs.replace(VIEW, machines=machines)
    text = " ".join(energy_sentences(view, None))
    assert "on 2 machines" in text
    assert "Not measured: nas. The real energy is higher." in text
    assert "no estimate of the cost" in text


@pytest.mark.parametrize(
    ("text", "price"), [("0.30 EUR", EnergyPrice(0.3, "EUR")), ("12€", EnergyPrice(12.0, "€"))]
)
def test_price_is_a_number_and_a_currency(text: str, price: EnergyPrice) -> None:
    assert parse_price(text) == price


@pytest.mark.parametrize("text", ["", "EUR", "0.3", "-1 EUR", "1 <b>", "nan EUR", "1e9 EUR", "1 EUR/kWh"])
def test_other_price_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="price of a kilowatt-hour"):
        parse_price(text)
