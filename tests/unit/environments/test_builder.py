"""Builds of real environments, from handmade wheels and without a network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

import barnraise
from barnraise.core.errors import RunEnvironmentError
from barnraise.core.file_lock import FileLock
from barnraise.environments import builder
from barnraise.environments.build_process import failure
from barnraise.environments.builder import (
    EnvironmentPlan,
    Mode,
    build,
    built_environments,
    plan_environment,
    remove_environment,
)
from barnraise.environments.installed_packages import Package, packages_of
from barnraise.environments.torch_build import TorchChoice
from tests.unit.processor_time import least_cpu_s

unix = pytest.mark.skipif(os.name == "nt", reason="the stand-in for uv is a script with a first line")


def nothing(_: str) -> None:
    pass


# Which file rules.


def plan(mode: Mode = "auto", **texts: str) -> EnvironmentPlan:
    files = {name.replace("__", "/").replace("_", "."): text.encode() for name, text in texts.items()}
    return plan_environment(files, mode)


def test_first_known_file_is_used() -> None:
    every = {"uv_lock": "a", "pyproject_toml": "b", "pylock_toml": "c"}
    every |= {"requirements_lock": "d", "requirements_txt": "e"}
    sources = []
    for missing in ("train_py", "uv_lock", "pylock_toml", "requirements_lock", "requirements_txt"):
        every.pop(missing, "")
        sources.append(plan(**every).source)
    assert sources == ["uv.lock", "pylock.toml", "requirements.lock", "requirements.txt", ""]
    assert plan(uv_lock="alone").kind == "agent"
    assert plan("agent", requirements_txt="x").kind == "agent"
    assert plan("sync", requirements_txt="x").kind == "requirements"


def test_sync_without_a_file_has_a_hint() -> None:
    with pytest.raises(RunEnvironmentError, match="nothing in the folder") as raised:
        plan("sync", train_py="")
    assert "requirements.txt" in raised.value.hint


def test_digest_follows_the_build_files() -> None:
    base = plan(requirements_txt="-r more.txt\nnumpy", more_txt="timm", train_py="1").digest
    assert base == plan(requirements_txt="-r more.txt\nnumpy", more_txt="timm", train_py="2").digest
    assert base != plan(requirements_txt="-r more.txt\nnumpy", more_txt="timm==2", train_py="1").digest
    assert base != plan(requirements_txt="-r more.txt\nnumpy ", more_txt="timm", train_py="1").digest
    local = plan(requirements_txt="./lib", train_py="1").digest
    assert local != plan(requirements_txt="./lib", train_py="2").digest


def test_editable_install_is_rejected() -> None:
    with pytest.raises(RunEnvironmentError, match="editable"):
        plan(requirements_txt="numpy\n-e .")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("torch", True),
        ("torch==2.13.0  # comment", True),
        ("numpy\ntorch >= 2 ; sys_platform == 'linux'", True),
        ("torch==2.13.0 \\\n  --hash=sha256:aa", False),
        ("-r more.txt", True),
        ("torchvision", False),
        ("torch-fidelity", False),
        ("# torch", False),
        ("torch==2.13.0+cu126", False),
        ("torch @ https://example.org/torch.whl", False),
        ("--extra-index-url https://download.pytorch.org/whl/cu126\ntorch", False),
        ("-i https://mirror.example/simple\ntorch", False),
        ("--find-links https://download.pytorch.org/whl/torch\ntorch", False),
    ],
)
def test_torch_has_a_step_of_its_own_only_without_another_source(text: str, wanted: bool) -> None:
    assert bool(plan(requirements_txt=text, more_txt="torch").torch) is wanted


def test_packages_that_must_fit_torch_are_installed_with_it() -> None:
    text = (
        "numpy\ntorch>=2.13 ; python_version > '3'\nTorchVision --no-binary :all:\ntorchmetrics\ntorch>=2.13"
    )
    wanted = ("torch>=2.13 ; python_version > '3'", "TorchVision", "torch>=2.13")
    assert plan(requirements_txt=text).torch == wanted


@pytest.mark.parametrize(
    ("text", "unhashed"),
    [
        ("", 0),
        ("numpy==2.4.0 --hash=sha256:aa\n# torch\n--require-hashes", 0),
        ("numpy==2.4.0 \\\n  --hash=sha256:aa\npillow\n-r more.txt", 2),
        ("numpy\ntorch", 2),
    ],
)
def test_requirements_without_a_hash_are_counted(text: str, unhashed: int) -> None:
    assert plan(requirements_txt=text, more_txt="tqdm").unhashed == unhashed


def test_invalid_bytes_are_left_to_pip() -> None:
    assert plan_environment({"requirements.txt": b"\xff\xfe\0torch"}, "auto").kind == "requirements"


# Building with venv and pip.


def wheel(folder: Path, name: str, version: str, text: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", text)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    wheel(folder, "tiny_need", "1.2", "value = 7")
    # The agent has one too, and the lock's must win.
    wheel(folder, "click", "99.0", "source = 'the lock'")
    wheel(folder, "barnraise", "0.0.1", "__version__ = '0.0.1'")
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(builder, "_uv", lambda: None)


def folder_with(parent: Path, **texts: str) -> tuple[Path, EnvironmentPlan]:
    files = {name.replace("_", "."): text.encode() for name, text in texts.items()}
    folder = parent / "folder"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder, plan_environment(files, "auto")


def output_of(python: Path, code: str) -> str:
    done = subprocess.run([str(python), "-P", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_built_environment_prefers_the_lock_over_the_agent(tmp_path: Path) -> None:
    folder, its_plan = folder_with(tmp_path, requirements_txt="tiny_need==1.2\nclick\n")
    messages: list[str] = []
    root = tmp_path / "environments"
    python = asyncio.run(build(its_plan, folder, root, messages.append))
    assert root in python.parents
    assert messages[0] == "building an environment from requirements.txt with venv and pip"
    assert any("Installing" in line for line in messages)
    code = (
        "import barnraise, click, msgspec, tiny_need as t\n"
        "print(barnraise.__version__, click.source, t.value)"
    )
    assert output_of(python, code) == f"{barnraise.__version__} the lock 7"
    assert Path(output_of(python, "import barnraise; print(barnraise.__file__)")) == Path(barnraise.__file__)
    packages = asyncio.run(packages_of(python, ["tiny_need", "click", "numpy", "no_such"]))
    assert packages.package("tiny_need") == Package("tiny_need", "tiny_need", "1.2")
    assert packages.package("click") == Package("click", "click", "99.0")
    assert packages.package("numpy") is not None
    assert packages.missing == ("no_such",)

    # A second run finds it; so does one whose other files differ.
    messages.clear()
    assert asyncio.run(build(its_plan, folder, root, messages.append)) == python
    assert least_cpu_s(lambda: asyncio.run(build(its_plan, folder, root, messages.append)), 3) < 1
    assert messages == []

    # Without its Python it does not count as whole any more.
    python.unlink()
    assert builder._complete_python(next(root.glob("*.whole"))) is None


@pytest.mark.slow
def test_unknown_requirement_is_named(tmp_path: Path) -> None:
    folder, its_plan = folder_with(tmp_path, requirements_txt="tiny_need==9.9\n")
    root = tmp_path / "environments"
    with pytest.raises(RunEnvironmentError, match=r"tiny_need==9\.9 could not be installed") as raised:
        asyncio.run(build(its_plan, folder, root, nothing))
    assert "ERROR: No matching distribution" in raised.value.message
    assert "in requirements.txt" in raised.value.hint
    assert [path.suffix for path in root.iterdir()] == [".lock"]


def test_lock_without_uv_has_a_hint(tmp_path: Path) -> None:
    folder, its_plan = folder_with(tmp_path, uv_lock="", pyproject_toml="")
    with pytest.raises(RunEnvironmentError, match=r"uv\.lock needs uv") as raised:
        asyncio.run(build(its_plan, folder, tmp_path / "environments", nothing))
    assert "pip install uv" in raised.value.hint


def test_agent_environment_needs_no_build(tmp_path: Path) -> None:
    python = asyncio.run(build(EnvironmentPlan(kind="agent"), tmp_path, tmp_path / "none", nothing))
    assert python == Path(sys.executable)
    assert not (tmp_path / "none").exists()


def test_environment_is_removed_unless_it_is_built_or_used_now(tmp_path: Path) -> None:
    (tmp_path / "0123.abcd").mkdir()
    (tmp_path / "0123.abcd" / "big").write_bytes(bytes(100))
    (tmp_path / "0123.whole").write_text("0123.abcd")
    os.utime(tmp_path / "0123.whole", (1000, 1000))
    (tmp_path / "4567.torn").mkdir()
    assert built_environments(tmp_path) == {"0123": 1000.0, "4567": 0.0}
    assert built_environments(tmp_path / "absent") == {}
    lock = FileLock(tmp_path / "0123.lock")
    assert lock.try_acquire()
    assert not remove_environment(tmp_path, "0123", 2000.0), "it is being built"
    lock.release()
    assert not remove_environment(tmp_path, "0123", 999.0), "it was used again"
    assert (tmp_path / "0123.abcd" / "big").exists()
    assert remove_environment(tmp_path, "0123", 2000.0)
    assert remove_environment(tmp_path, "4567", 2000.0)
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}


def test_unwritable_root_is_reported(tmp_path: Path) -> None:
    folder, its_plan = folder_with(tmp_path, requirements_txt="")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunEnvironmentError, match="cannot store the environment in"):
        asyncio.run(build(its_plan, folder, tmp_path / "file", nothing))


# Building with uv: a stand-in that writes down how it was called.

FAKE_UV = """#!{python}
import json, os, subprocess, sys, time
from pathlib import Path
with open({calls!r}, "a") as file:
    kept = {{name: value for name, value in os.environ.items() if name.startswith("UV_")}}
    file.write(json.dumps([sys.argv[1:], kept, os.getcwd()]) + "\\n")
print("Resolved 3 packages in 1ms", flush=True)
if sys.argv[1] == "venv":
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", sys.argv[-1]], check=True)
else:
    {body}
"""


def fake_uv(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str = "pass") -> Path:
    calls = folder / "calls"
    path = folder / "uv"
    path.write_text(FAKE_UV.format(python=sys.executable, calls=str(calls), body=body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return calls


def calls_in(file: Path) -> list[tuple[list[str], dict[str, str], str]]:
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


@unix
def test_uv_installs_torch_alone_from_its_index_and_then_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries a package of the file on the index of torch: no step may ask two indexes."""
    calls = fake_uv(monkeypatch, tmp_path)
    for name in ("PIP_INDEX_URL", "PIP_NO_INDEX", "UV_INDEX_STRATEGY", "UV_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VIRTUAL_ENV", "/somewhere/else")
    choice = TorchChoice(True, "https://download.pytorch.org/whl/cu130", "")
    monkeypatch.setattr(builder, "choose_torch_here", lambda: choice)
    folder, its_plan = folder_with(tmp_path, requirements_txt="torch==2.13.0\nnumpy\n")
    messages: list[str] = []
    python = asyncio.run(build(its_plan, folder, tmp_path / "environments", messages.append))
    (create, _, _), (torch, before, _), (rest, after, cwd) = calls_in(calls)
    assert create == ["venv", "--no-project", "--python", sys.executable, str(python.parents[1])]
    install = ["pip", "install", "--python", str(python)]
    assert torch == [*install, "--index-url", choice.index, "torch==2.13.0"]
    assert rest == [*install, "-r", "requirements.txt"]
    for variables in (before, after):
        assert "UV_EXTRA_INDEX_URL" not in variables
        assert "UV_INDEX_STRATEGY" not in variables
    assert cwd == str(folder)
    assert "Resolved 3 packages in 1ms" in messages
    assert output_of(python, "import barnraise; print(barnraise.__version__)") == barnraise.__version__


@unix
def test_index_of_the_user_replaces_the_index_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_uv(monkeypatch, tmp_path)
    monkeypatch.setenv("UV_INDEX_URL", "https://mine.example/simple")
    folder, its_plan = folder_with(tmp_path, requirements_txt="torch==2.13.0\n")
    asyncio.run(build(its_plan, folder, tmp_path / "environments", nothing))
    _, (install, _, _) = calls_in(calls)
    assert "--index-url" not in install


def test_pip_installs_torch_alone_from_its_index_and_then_the_rest(tmp_path: Path) -> None:
    its_plan = EnvironmentPlan(
        kind="requirements", source="requirements.txt", torch=("torch>=2", "torchvision")
    )
    _, torch, rest = builder._pip_steps(its_plan, tmp_path, "https://i.example")
    install = ("-m", "pip", "install")
    assert torch.command[1:] == (*install, "--index-url", "https://i.example", "torch>=2", "torchvision")
    assert rest.command[1:] == (*install, "-r", "requirements.txt")


@pytest.mark.slow
def test_package_on_the_index_of_torch_does_not_replace_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries a higher version of a package of the file on the index of torch, with the real pip."""
    index, own = tmp_path / "index", tmp_path / "own"
    for place, name, version in (
        (index, "torch", "2.13.0"),
        (index, "pebble", "9.0"),
        (own, "pebble", "1.0"),
    ):
        (place / name).mkdir(parents=True)
        wheel(place / name, name, version, f"version = {version!r}")
        file = f"{name}-{version}-py3-none-any.whl"
        (place / name / "index.html").write_text(f'<!DOCTYPE html><a href="{file}">{file}</a>')
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[global]\nindex-url = {own.as_uri()}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("HOME", str(tmp_path))  # no other settings of pip
    monkeypatch.setattr(builder, "choose_torch_here", lambda: TorchChoice(True, index.as_uri(), ""))
    folder, its_plan = folder_with(tmp_path, requirements_txt="torch\npebble\n")
    python = asyncio.run(build(its_plan, folder, tmp_path / "environments", nothing))
    assert output_of(python, "import torch, pebble; print(torch.version, pebble.version)") == "2.13.0 1.0"


@unix
def test_uv_builds_from_its_lock_and_leaves_torch_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_uv(monkeypatch, tmp_path)
    folder, its_plan = folder_with(tmp_path, uv_lock="torch", pyproject_toml="")
    python = asyncio.run(build(its_plan, folder, tmp_path / "environments", nothing))
    _, (sync, variables, _) = calls_in(calls)
    assert sync == ["sync", "--frozen", "--no-install-workspace", "--python", sys.executable]
    assert variables["UV_PROJECT_ENVIRONMENT"] == str(python.parents[1])
    assert "UV_EXTRA_INDEX_URL" not in variables


@unix
def test_lock_with_another_barnraise_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheels: Path
) -> None:
    unpack = (
        "import glob, zipfile; place = glob.glob(str(Path(sys.argv[4]).parents[1] / 'lib/*/site-packages'))"
    )
    wheel_file = wheels / "barnraise-0.0.1-py3-none-any.whl"
    fake_uv(monkeypatch, tmp_path, f"{unpack}; zipfile.ZipFile({str(wheel_file)!r}).extractall(place[0])")
    folder, its_plan = folder_with(tmp_path, requirements_txt="needs-barnraise==0.0.1\n")
    with pytest.raises(RunEnvironmentError, match=r"requirements\.txt installs barnraise 0\.0\.1") as raised:
        asyncio.run(build(its_plan, folder, tmp_path / "environments", nothing))
    assert "Remove barnraise" in raised.value.hint


SLEEP = (
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "Path('child').write_text(str(child.pid)); print('Installing slowly', flush=True); child.wait()"
)


async def child_of(folder: Path) -> int:
    while True:
        with contextlib.suppress(OSError, ValueError):
            return int((folder / "child").read_text())
        await asyncio.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@unix
def test_cancelled_build_leaves_no_process_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_uv(monkeypatch, tmp_path, SLEEP)
    folder, its_plan = folder_with(tmp_path, requirements_txt="slow\n")
    root = tmp_path / "environments"

    async def body() -> int:
        waiting: list[str] = []
        task = asyncio.create_task(build(its_plan, folder, root, nothing))
        child = await child_of(folder)
        second = asyncio.create_task(build(its_plan, folder, root, waiting.append))
        async with asyncio.timeout(60):
            while not waiting:
                await asyncio.sleep(0.02)
        assert waiting == ["waiting for another run that builds the same environment"]
        second.cancel()
        task.cancel()
        for each in (task, second):
            with pytest.raises(asyncio.CancelledError):
                await each
        return child

    child = asyncio.run(body())
    until = time.monotonic() + 60
    while not is_gone(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert is_gone(child)
    assert [path.suffix for path in root.iterdir()] == [".lock"]

    # The next build starts from nothing, and removes the leftovers of a killed agent.
    monkeypatch.undo()
    calls.unlink()
    fake_uv(monkeypatch, tmp_path)
    key = next(root.glob("*.lock")).stem
    (root / f"{key}.dead").mkdir()
    python = asyncio.run(build(its_plan, folder, root, nothing))
    assert python.exists()
    assert not (root / f"{key}.dead").exists()


def test_missing_folder_is_reported(tmp_path: Path) -> None:
    its_plan = plan_environment({"requirements.txt": b""}, "auto")
    with pytest.raises(RunEnvironmentError, match="cannot be started"):
        asyncio.run(build(its_plan, tmp_path / "gone", tmp_path / "environments", nothing))


@unix
def test_build_over_its_deadline_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_uv(monkeypatch, tmp_path, SLEEP)
    folder, its_plan = folder_with(tmp_path, requirements_txt="slow\n")
    with pytest.raises(
        RunEnvironmentError, match=r"cannot build the environment from requirements\.txt within 3 s"
    ):
        asyncio.run(build(its_plan, folder, tmp_path / "environments", nothing, deadline_s=3))


# What the tools' last words mean.


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            "  ╰─▶ Because nosuch was not found in the package registry and you require nosuch, we can",
            "nosuch could not be installed",
            "remove nosuch in r.txt",
        ),
        ("Because there is no version of numpy==9 and you require numpy==9", "numpy==9", "r.txt"),
        ("Because only numpy<=2.4 is available and you require numpy>9", "numpy<=2.4", "r.txt"),
        ("  × Failed to build `apex==0.1`", "apex==0.1", "r.txt"),
        ("ERROR: Failed building wheel for apex", "apex", "r.txt"),
        (
            "ERROR: Cannot install a==1 and b because these package versions have conflicting",
            "a==1 and b",
            "",
        ),
        (
            "Retrying: NewConnectionError()\nERROR: No matching distribution found for numpy",
            "numpy could not be fetched",
            "internet",
        ),
        ("OSError: [Errno 28] No space left on device", "disk is full", "Free disk space"),
        (
            "The virtual environment was not created because ensurepip is not available",
            "cannot create",
            "venv",
        ),
        ("something else", "exited with code 3", "lines above"),
        ("", "exited with code 3", "--env agent"),
    ],
)
def test_failure_names_package_and_action(words: str, message: str, hint: str) -> None:
    error = failure("r.txt", words.splitlines(), 3)
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize("only", [True, False])
def test_wheels_only_plan_builds_nothing(tmp_path: Path, only: bool) -> None:
    requirements = EnvironmentPlan(kind="requirements", source="requirements.txt", wheels_only=only)
    lock = EnvironmentPlan(kind="uv.lock", source="uv.lock", wheels_only=only)
    pip, uv = (
        builder._pip_steps(requirements, tmp_path, None),
        builder._uv_steps("uv", requirements, tmp_path, None),
    )
    assert all((":all:" in step.command) is only for step in (pip[-1], uv[-1]))
    assert ("--no-build" in builder._uv_steps("uv", lock, tmp_path, None)[-1].command) is only
