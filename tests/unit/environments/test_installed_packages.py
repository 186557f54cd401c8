from __future__ import annotations

import asyncio
import importlib.metadata
import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from barnraise.core.errors import RunEnvironmentError
from barnraise.environments import installed_packages as packages_module
from barnraise.environments.installed_packages import InstalledPackages, Package, own_packages, packages_of
from tests.unit.processor_time import least_cpu_s

NAMES = ("numpy", "json", "no_such_package_here", "click")


def installed(folder: Path, name: str, version: str, imports: str) -> None:
    """A package as pip leaves it: a module and its metadata."""
    folder.mkdir(exist_ok=True)
    (folder / f"{imports}.py").write_text("raise RuntimeError('this module must not be imported')")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(imports)


def test_own_packages_are_found_without_import() -> None:
    packages = own_packages(NAMES)
    assert packages.package("numpy") == Package("numpy", "numpy", importlib.metadata.version("numpy"))
    assert packages.package("json") == Package("json")
    assert packages.missing == ("no_such_package_here",)
    assert packages.python == ".".join(map(str, sys.version_info[:3]))
    assert packages.executable == sys.executable
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packages), type=InstalledPackages) == packages


def test_import_name_may_differ_from_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    installed(tmp_path / "site", "Scikit.Fancy", "3.1", "skfancy")
    assert own_packages(["skfancy"]).package("skfancy") == Package("skfancy", "Scikit.Fancy", "3.1")
    # What is installed while the agent runs is found at the next question.
    installed(tmp_path / "site", "later", "1.0", "later_name")
    assert own_packages(["later_name"]).package("later_name") == Package("later_name", "later", "1.0")


def test_folder_without_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs_of_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert own_packages(["outputs_of_runs"]).missing == ("outputs_of_runs",)


def test_second_query_is_fast() -> None:
    own_packages(NAMES)
    assert least_cpu_s(lambda: own_packages(NAMES)) < 0.3


def test_failing_finder_means_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> None:
            if name == "cursed":
                raise RuntimeError("broken finder")

    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    assert own_packages(["cursed"]).missing == ("cursed",)


def test_other_python_reports_the_same() -> None:
    packages = asyncio.run(packages_of(Path(sys.executable), NAMES))
    assert packages == own_packages(NAMES)
    assert asyncio.run(packages_of(Path(sys.executable), [])).packages == ()


def fake_python(folder: Path, body: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.skipif(os.name == "nt", reason="scripts with a first line start on Unix only")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise SystemExit('the loader is broken')", "the loader is broken"),
        ("raise SystemExit(3)", "exited with code 3"),
        ("print('hello')", "cannot be read"),
        ("print('{\"python\": \"' + 'x' * 1000 + '\"}')", "cannot be read"),
        ("print('x' * 3_000_000)", "cannot be read"),
        ("print('[' * 100_000)", "cannot be read"),
    ],
)
def test_failing_python_is_reported(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(RunEnvironmentError, match=words) as raised:
        asyncio.run(packages_of(fake_python(tmp_path, body), ["numpy"], deadline_s=60))
    assert str(tmp_path) in raised.value.hint


@pytest.mark.skipif(os.name == "nt", reason="scripts with a first line start on Unix only")
def test_hanging_python_is_reported(tmp_path: Path) -> None:
    hangs = fake_python(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(RunEnvironmentError, match="did not answer within 1 s") as raised:
        asyncio.run(packages_of(hangs, ["numpy"], deadline_s=1))
    assert str(tmp_path) in raised.value.hint


def test_missing_python_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunEnvironmentError, match="cannot be started"):
        asyncio.run(packages_of(tmp_path / "nowhere", []))


def test_names_are_bounded() -> None:
    packages = own_packages([f"name{i}" for i in range(5000)] + ["x" * 500])
    assert len(packages.missing) == packages_module.MOST_NAMES
    assert own_packages(["", "x" * 500]).missing == ()
