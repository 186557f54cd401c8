"""The progress of a build, as pip and uv print it."""

from __future__ import annotations

from barnraise.environments.build_process import BuildProgress


def test_build_progress_names_the_package_and_its_share() -> None:
    progress = BuildProgress()
    lines = [
        "Collecting torch (from -r requirements.txt (line 1))",
        "  Downloading https://x.org/whl/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl (906.4 MB)",
        "Progress 1048576 of 906400000",
        "ERROR: something",
        "Progress many of none",
        "  Using cached numpy-2.1.0-cp311-cp311-win_amd64.whl (16 MB)",
    ]
    assert [progress.words(line) for line in lines] == [
        "Collecting torch (from -r requirements.txt (line 1))",
        "Downloading torch 2.13.0%2Bcpu (906.4 MB)",
        "Downloading torch 2.13.0%2Bcpu: 1 MiB of 864 MiB",
        "",
        "",
        "Using cached numpy 2.1.0 (16 MB)",
    ]


def test_build_progress_keeps_the_lines_of_uv() -> None:
    progress = BuildProgress()
    assert progress.words("Downloading torch (845.5MiB)") == "Downloading torch (845.5MiB)"
    assert progress.words("Resolved 12 packages in 1.20s") == "Resolved 12 packages in 1.20s"
    assert progress.words(" + numpy==2.1.0") == ""
