"""The size of an environment, as far as its source tells it."""

from __future__ import annotations

import pytest

from barnraise.environments.build_plan import plan_environment
from barnraise.environments.build_size import BuildSize, build_size

LOCK = b"""
[[package]]
name = "spiral"
source = { virtual = "." }

[[package]]
name = "torch"
sdist = { url = "x", size = 10 }
wheels = [{ url = "a", size = 3000 }, { url = "b", size = 2000 }]

[[package]]
name = "numpy"
wheels = [{ url = "c", size = 72 }]
"""


def size_of(**files: bytes) -> BuildSize:
    named = {name.replace("_", "."): text for name, text in files.items()}
    return build_size(plan_environment(named, "auto"), named)


def test_requirements_tell_packages_and_torch() -> None:
    size = size_of(requirements_txt=b"# mine\nnumpy==2.1\nTorch>=2\n\n--no-index\nnumpy\n")
    assert size == BuildSize(2, has_torch=True)
    assert size.text == "2 packages, with torch: 0.2 to 3 GB"
    assert size_of(requirements_txt=b"torchvision").text == "1 package"


def test_requirements_count_addresses_paths_and_included_files() -> None:
    """None of them may be missing in the number that a guest's user is told."""
    files = {
        "requirements.txt": b"numpy\n-r more.txt\ngit+https://example.org/x\n./own\nwheels/a.whl\nhttps://example.org/b.whl\n",
        "more.txt": b"pandas\nnumpy>=2\nb @ https://example.org/b.whl\n",
    }
    assert build_size(plan_environment(files, "auto"), files).packages == 7


def test_lock_tells_the_largest_files() -> None:
    size = size_of(uv_lock=LOCK, pyproject_toml=b"")
    assert size == BuildSize(2, has_torch=True, max_bytes=3072)
    assert size.text == "2 packages, at most 3 KiB"


@pytest.mark.parametrize("lock", [b"]", b"package = 3", b"[[package]]\nwheels = 3\nsdist = 4", b"\xff"])
def test_unusual_lock_tells_nothing(lock: bytes) -> None:
    assert size_of(uv_lock=lock, pyproject_toml=b"").max_bytes == 0
