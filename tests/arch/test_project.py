"""The promises of pyproject.toml agree with the code and the documents."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import Any

import pytest

from barnraise import __version__
from barnraise.core import installation
from tests.arch.source_tree import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_torch_is_an_extra_in_the_tested_range_only() -> None:
    project = PROJECT["project"]
    assert not [need for need in project["dependencies"] if need.startswith("torch")]
    assert project["optional-dependencies"]["torch"] == [f"torch{installation.TESTED_RANGE}"]
    first = ".".join(map(str, installation.TESTED_FIRST))
    below = ".".join(map(str, installation.TESTED_BELOW))
    assert f">={first},<{below}" == installation.TESTED_RANGE


def test_checks_pin_torch_in_tested_range() -> None:
    lines = (ROOT / ".ci" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = [line for line in lines if line.startswith("torch==")]
    assert installation.is_tested(pin.removeprefix("torch=="))


@pytest.mark.parametrize("name", ["requirements.txt", "trackers.txt"])
def test_every_requirement_of_the_checks_is_exact(name: str) -> None:
    lines = (ROOT / ".ci" / name).read_text(encoding="utf-8").splitlines()
    needs = [line for line in lines if line and not line.startswith("#")]
    assert [need for need in needs if need.count("==") != 1] == []


def test_entry_points_name_our_functions() -> None:
    project = PROJECT["project"]
    assert project["scripts"] == {"barnraise": "barnraise.cli.main:main"}
    assert project["entry-points"]["torch.backends"] == {
        "barnraise": "barnraise.collectives.torch_patch.autoload:register"
    }


def test_changelog_names_this_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# A word after "pip install" is an option, a local path, or the name of a distribution.
_PIP_INSTALL = re.compile(r"pip3? install((?: +(?:\"[^\"\n]+\"|'[^'\n]+'|[^\s`'\"),;]+))+)")
_OTHER_DISTRIBUTIONS = {
    "anywidget",
    "bitsandbytes",
    "diffusers",
    "flwr",
    "ipython",
    "lightning-fabric",
    "lm_eval",
    "mlflow",
    "numpy",
    "nvidia-ml-py",
    "only_on_the_mac",
    "tensorboard",
    "textual",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "optuna",
    "peft",
    "torch",
    "torchft",
    "trackio",
    "transformers",
    "trl",
    "uv",
    "wandb",
}


def _installed_names(text: str) -> set[str]:
    """Return the distribution names that a text tells people to install from the package index."""
    names = set()
    for match in _PIP_INSTALL.finditer(text):
        for word in match[1].replace('"', " ").replace("'", " ").split():
            name = re.match(r"[A-Za-z0-9][A-Za-z0-9_.-]*", word)
            if name and not word.startswith((".", "/", "-")):
                names.add(name[0].rstrip(".").lower())
    return names


def test_install_texts_name_no_distribution_of_others() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    wrong = []
    for name in listed.stdout.splitlines():
        if not name.endswith((".py", ".md", ".txt", ".toml", ".yml")) or name.startswith("tests/"):
            continue
        for line_number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
            # A "{" is a value that is filled in at run time; prose ends at a word such as "in".
            names = _installed_names(line) - _OTHER_DISTRIBUTIONS
            # There is no release yet, so our own name may be another project's.
            wrong += [f"{name}:{line_number}: {installed}" for installed in names]
    assert wrong == []


def test_hashes_name_the_pins_of_the_checks() -> None:
    """Made by `python .ci/lock.py`; torch comes from an index of its own."""
    pins = {
        line for line in (ROOT / ".ci" / "requirements.txt").read_text("utf-8").splitlines() if "==" in line
    }
    hashed = re.findall(
        r"^(\S+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}",
        (ROOT / ".ci" / "hashes.txt").read_text("utf-8"),
        re.MULTILINE,
    )
    wanted = {pin for pin in pins if not pin.startswith(("torch==", "#"))} | {"colorama==0.4.6"}
    assert wanted == set(hashed)


def test_actions_of_workflows_are_pinned_by_hash() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (\S+)", file.read_text("utf-8"))
        assert used
        assert [name for name in used if not re.search(r"@[0-9a-f]{40}$", name)] == [], file.name
