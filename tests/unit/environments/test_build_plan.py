"""Requirements that are refused: our own name on an index, and code that would be built for others."""

from __future__ import annotations

import pytest

from barnraise.core.errors import RunEnvironmentError
from barnraise.environments.build_plan import EnvironmentPlan, allow_wheels_only, plan_environment


def _plan(text: str) -> EnvironmentPlan:
    return plan_environment({"requirements.txt": text.encode()}, "auto")


@pytest.mark.parametrize(
    "line", ["barnraise", "Barnraise>=0.1", "barnraise[hub]==0.1.0", "barnraise ; python_version>'3'"]
)
def test_requirement_of_our_name_is_rejected_before_anything_is_installed(line: str) -> None:
    with pytest.raises(RunEnvironmentError, match="does not need") as raised:
        _plan(f"numpy\n{line}\n")
    assert "Remove barnraise" in raised.value.hint


@pytest.mark.parametrize("line", ["barnraise-extras", "barnraise @ file:///src/barnraise"])
def test_requirement_of_another_name_or_of_a_folder_is_planned(line: str) -> None:
    assert _plan(line).kind == "requirements"


@pytest.mark.parametrize(
    "line",
    [
        "./package",
        "package/",
        "package @ file:///x/package",
        "git+https://x.example/package.git",
        "package @ git+https://x.example/package.git@v1",
        "https://x.example/package-1.0.tar.gz",
        "package-1.0.zip",
    ],
)
def test_requirement_that_is_built_is_rejected_for_a_folder_of_others(line: str) -> None:
    plan = _plan(f"numpy\n{line}\n")
    assert plan.sources == (line,)
    with pytest.raises(RunEnvironmentError, match="outside of the sandbox"):
        allow_wheels_only(plan)


@pytest.mark.parametrize(
    "line",
    [
        "numpy==2.0 --hash=sha256:00",
        "./package-1.0-py3-none-any.whl",
        "x @ https://x.example/x-1-py3-none-any.whl",
    ],
)
def test_wheels_and_names_are_allowed_for_a_folder_of_others(line: str) -> None:
    assert allow_wheels_only(_plan(line)).wheels_only
