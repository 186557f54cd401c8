"""Simulated homes: the page is what the command computes, and the models have their known sizes."""

from __future__ import annotations

import pytest

from benchmarks.bigger.homes import (
    BITS,
    DEVICES,
    HOMES,
    PAGE,
    SHAPES,
    Case,
    cases,
    figures_of,
    parts_of,
    problem_of,
    render,
)


@pytest.fixture(scope="module")
def computed() -> list[Case]:
    return list(cases())


def test_page_is_what_the_command_computes(computed: list[Case]) -> None:
    text = render(computed)
    assert PAGE.read_text(encoding="utf-8") == text, "python -m benchmarks.bigger.homes --write"
    assert "Nothing of this was run" in text
    assert all(device.name in text and device.source in text for device in DEVICES)


def test_each_model_of_each_home_has_rivals_with_prices(computed: list[Case]) -> None:
    assert len(computed) == len(HOMES) * len(SHAPES) * len(BITS)
    for case in computed:
        kinds = {rival.kind for rival in case.rivals}
        assert {"alone", "sharded"} <= kinds
        assert any(rival.step_s is not None for rival in case.rivals)
        if case.split is not None:
            assert case.split.step.step_s >= 0.999 * case.split.step.bound_s
    assert figures_of(computed)["is_simulated"] is True
    used = {name for home in HOMES for name in home.devices}
    assert used == {device.name for device in DEVICES}


@pytest.mark.parametrize(("shape", "billions"), [*zip(SHAPES, (8.03, 32.76, 70.55), strict=True)])
def test_models_have_their_known_sizes(shape: object, billions: float) -> None:
    parts = parts_of(shape, 16)  # type: ignore[arg-type]
    weights = sum(part.frozen_bytes for part in (parts.before, *parts.blocks, parts.after)) / 2
    assert weights / 1e9 == pytest.approx(billions, rel=0.002)
    small = parts_of(shape, 4)  # type: ignore[arg-type]
    assert small.blocks[0].frozen_bytes * 8 / (parts.blocks[0].frozen_bytes / 2) == pytest.approx(4.5, 0.001)


def test_two_machines_of_one_kind_have_different_names() -> None:
    for home in HOMES:
        names = [machine.name for machine in problem_of(home, SHAPES[0], 16).machines]
        assert len(names) == len(set(names))
