"""Checks of image names and of the probe's output."""

from __future__ import annotations

import re
import sys

import pytest

from barnraise.agent.containers.image import check_arguments, check_result
from barnraise.core.errors import RunEnvironmentError
from tests.unit.agent.containers.fake_engine import HERE, IMAGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers work on Linux only")


@pytest.mark.parametrize("image", ["", "--privileged", "-v/:/host", "a b", "a\nb", "a,b", "ä"])
def test_check_arguments_rejects_image_that_looks_like_option(image: str) -> None:
    with pytest.raises(RunEnvironmentError, match="is not the name of an image"):
        check_arguments(image, ())


def test_check_arguments_rejects_relative_path_or_colon() -> None:
    check_arguments("registry.local:5000/Team/trainer@sha256:abc", ("/data/a b",))
    for path in ("/data:ro", "data"):
        with pytest.raises(RunEnvironmentError, match="cannot mount"):
            check_arguments(IMAGE, (path,))


@pytest.mark.parametrize(
    ("code", "lines", "words", "fix"),
    [
        (
            1,
            ["ModuleNotFoundError: No module named 'barnraise'"],
            "does not have Barnraise",
            "RUN pip install",
        ),
        (127, ["exec: python: not found"], "does not have Barnraise", "your copy of this repository"),
        (
            0,
            ["banner", "barnraise 0.0.9", "agent answers"],
            "has Barnraise 0.0.9",
            "RUN pip install /barnraise",
        ),
        (125, ["docker: no space left on device"], "cannot start a container of the image", "run again"),
        (125, ["could not select device driver with capabilities: [[gpu]]"], "capabilities", "Toolkit"),
        (1, [HERE, "PermissionError: [Errno 13]"], "does not reach this machine's agent", "userns-remap"),
        (0, [HERE, "agent absent"], "does not reach this machine's agent", "--container"),
    ],
)
def test_check_result_unusable_image_raises(code: int, lines: list[str], words: str, fix: str) -> None:
    with pytest.raises(RunEnvironmentError, match=re.escape(words)) as raised:
        check_result(IMAGE, code, lines)
    assert fix in raised.value.hint


def test_check_result_usable_image_passes() -> None:
    check_result(IMAGE, 0, ["a banner of the image", HERE, "agent answers"])
