"""Builder of a run's environment with uv or pip, from the lock or requirements file in its folder.

An environment is identified by what it is built from: the files, this Python, the platform and this
Barnraise. A second run finds it again. It is built in a new folder, and a small file points to it only when
it is complete. So a killed build leaves nothing that looks complete, and installed commands keep their path.

**Consequences of the ``.pth`` file.** The search path of a built environment ends with the folders from
which the agent itself was imported. So

- `barnraise` and its dependencies need not be in the lock, and have the agent's version. A lock that names
  another version is rejected;
- packages of the lock win, also for Barnraise: a lock with a numpy that is too old breaks Barnraise;
- a package that is missing in the lock may still be found in the agent's environment, on one machine only.
  The comparison before the run shows it;
- the environment needs the agent's Python. It is never built for another one, and it breaks when the agent's
  environment is removed.

**torch.** If requirements name torch without an index, the index for this machine's devices is added to the
user's own indexes. A lock decides alone: every machine gets what the lock pins. On Windows a lock made from
PyPI therefore gives a torch without CUDA.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import platform
import re
import secrets
import shutil
import site
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import barnraise
from barnraise.core.errors import RunEnvironmentError
from barnraise.core.file_lock import FileLock
from barnraise.core.files import write_atomically
from barnraise.environments.build_plan import EnvironmentPlan, Mode, plan_environment
from barnraise.environments.build_process import BuildStep, run_step
from barnraise.environments.torch_build import choose_torch_here

__all__ = ["EnvironmentPlan", "Mode", "build", "built_environments", "plan_environment", "remove_environment"]

Progress = Callable[[str], None]

# A torch with CUDA has some gigabytes, and some connections are slow.
_DEADLINE_S = 3600.0
_POLL_S = 0.1
_WINDOWS = sys.platform == "win32"
# The last in the alphabet: what the environment's own files add goes before ours.
_PTH_NAME = "zzz_barnraise_agent.pth"
# These variables would point the tools to another environment.
_MISLEADING = (
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "UV_PROJECT_ENVIRONMENT"),
)
_INDEX_VARIABLES = ("PIP_INDEX_URL", "PIP_NO_INDEX", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_NO_INDEX")
_CHECK = "import barnraise; print('barnraise', barnraise.__version__)"


async def build(
    plan: EnvironmentPlan,
    folder: Path,
    target_root: Path,
    on_progress: Progress,
    *,
    deadline_s: float = _DEADLINE_S,
) -> Path:
    """Return the Python of the environment: the agent's own, one that was built before, or a new one."""
    if plan.kind == "agent":
        return Path(sys.executable)
    key = _key(plan)
    pointer = target_root / f"{key}.whole"
    try:
        target_root.mkdir(parents=True, exist_ok=True)
        async with asyncio.timeout(deadline_s):
            lock = await _locked(target_root / f"{key}.lock", on_progress)
            try:
                python = _complete_python(pointer)
                if python is None:
                    await asyncio.to_thread(_sweep, target_root, key)
                    python = await _build_new(plan, folder, target_root, key, on_progress)
                    _write_pointer(pointer, python)
                os.utime(pointer)  # the time of its last use
            finally:
                lock.release()
    except TimeoutError:
        raise RunEnvironmentError(
            f"cannot build the environment from {plan.source} within {deadline_s:g} s",
            hint="Run again (pip and uv keep their downloads), or check this machine's network.",
        ) from None
    except OSError as error:
        raise RunEnvironmentError(
            f"cannot store the environment in {target_root}: {error}",
            hint="Free disk space there, or make the folder writable for the agent, then run again.",
        ) from None
    return python


def built_environments(target_root: Path) -> dict[str, float]:
    """Return the time of the last use of each environment, by its key; unfinished ones were never used."""
    try:
        names = os.listdir(target_root)
    except OSError:
        return {}
    used: dict[str, float] = {}
    for name in names:
        key, _, suffix = name.partition(".")
        if suffix != "lock":
            used.setdefault(key, 0.0)
        if suffix == "whole":
            with contextlib.suppress(OSError):
                used[key] = (target_root / name).stat().st_mtime
    return used


def remove_environment(target_root: Path, key: str, unused_since: float) -> bool:
    """Remove an environment; return False if it is being built or was used after ``unused_since``."""
    lock = FileLock(target_root / f"{key}.lock")
    if not lock.try_acquire():
        return False
    try:
        if built_environments(target_root).get(key, 0.0) > unused_since:
            return False
        _sweep(target_root, key)
    finally:
        lock.release()
    return True


def is_built(plan: EnvironmentPlan, target_root: Path) -> bool:
    """Tell whether this machine has the environment already."""
    return plan.kind == "agent" or _complete_python(target_root / f"{_key(plan)}.whole") is not None


async def _build_new(
    plan: EnvironmentPlan, folder: Path, target_root: Path, key: str, on_progress: Progress
) -> Path:
    environment = target_root / f"{key}.{secrets.token_hex(4)}"
    uv = _uv()
    if uv is None and plan.kind in ("uv.lock", "pylock.toml"):
        raise RunEnvironmentError(
            f"{plan.source} needs uv, which is not installed on this machine",
            hint=f'Install it here with `"{sys.executable}" -m pip install uv`, or put a requirements.txt '
            f"into the folder in place of {plan.source}.",
        )
    on_progress(f"building an environment from {plan.source} with {'uv' if uv else 'venv and pip'}")
    index = choose_torch_here().index if plan.torch and not _has_own_index() else None
    steps = _uv_steps(uv, plan, environment, index) if uv else _pip_steps(plan, environment, index)
    is_complete = False
    try:
        for step in steps:
            await run_step(step, plan.source, folder, _tool_environment(step), on_progress)
        _fall_back_to_agent(environment)
        python = _python_in(environment)
        await _check(python, plan, folder)
        is_complete = True
        return python
    finally:
        if not is_complete:
            await asyncio.to_thread(shutil.rmtree, environment, ignore_errors=True)


def _uv() -> str | None:
    """Return the path of uv: on the search path, or installed beside the agent."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def _uv_steps(uv: str, plan: EnvironmentPlan, environment: Path, index: str | None) -> list[BuildStep]:
    python = str(_python_in(environment))
    create = BuildStep((uv, "venv", "--no-project", "--python", sys.executable, str(environment)))
    if plan.kind == "uv.lock":
        # The folder's own code is imported from the folder: an install of it would outlive the folder.
        no_build = ("--no-build",) if plan.wheels_only else ()
        sync = (uv, "sync", "--frozen", "--no-install-workspace", *no_build, "--python", sys.executable)
        return [create, BuildStep(sync, {"UV_PROJECT_ENVIRONMENT": str(environment)})]
    install = (uv, "pip", "install", "--python", python)
    return [create, *_install_steps(install, plan, index)]


def _pip_steps(plan: EnvironmentPlan, environment: Path, index: str | None) -> list[BuildStep]:
    create = BuildStep((sys.executable, "-m", "venv", str(environment)))
    install = (str(_python_in(environment)), "-m", "pip", "install")
    return [create, *_install_steps(install, plan, index)]


def _install_steps(install: tuple[str, ...], plan: EnvironmentPlan, index: str | None) -> list[BuildStep]:
    """Return the steps that install; no step asks two indexes.

    With two, the highest version of any name would win from either, also one that a stranger uploaded.
    So torch comes from its own index first. Then it is installed, and the rest is installed without that
    index.
    """
    if plan.wheels_only:
        install += ("--only-binary", ":all:")
    torch = [BuildStep((*install, "--index-url", index, *plan.torch))] if index is not None else []
    return [*torch, BuildStep((*install, "-r", plan.source))]


def _has_own_index() -> bool:
    """Return True if the user's variables name the index of all packages; torch comes from there, too."""
    return any(os.environ.get(name) for name in _INDEX_VARIABLES)


def _tool_environment(step: BuildStep) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    quiet = {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "raw" if _has_raw_progress() else "off",
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **quiet, **step.variables}


def _has_raw_progress() -> bool:
    """Tell whether the pip of a new environment can print its progress as lines: since 24.1."""
    try:
        import ensurepip

        numbers = re.match(r"(\d+)\.(\d+)", ensurepip.version())
    except ImportError:  # Debian has it in a package of its own
        return False
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (24, 1)


async def _check(python: Path, plan: EnvironmentPlan, folder: Path) -> None:
    """Check that the environment imports the same Barnraise version."""
    output: list[str] = []
    step = BuildStep((str(python), "-P", "-c", _CHECK))
    await run_step(step, plan.source, folder, _tool_environment(step), output.append, every_line=True)
    if f"barnraise {barnraise.__version__}" not in output:
        other = output[-1] if output else "nothing"
        raise RunEnvironmentError(
            f"{plan.source} installs {other}, but this machine runs barnraise {barnraise.__version__}",
            hint=f"Remove barnraise from {plan.source}: a run uses the agent's version.",
        )


def _fall_back_to_agent(environment: Path) -> None:
    places = sysconfig.get_path(
        "purelib", scheme="venv", vars={"base": str(environment), "platbase": str(environment)}
    )
    # As a statement, since Pythons differ in the encoding that they read plain lines of such a file with.
    line = f"import sys; sys.path += {_agent_places()!a}\n"
    (Path(places) / _PTH_NAME).write_text(line, encoding="ascii")


def _agent_places() -> list[str]:
    """Return the folders from which the agent imports Barnraise and its dependencies, in order."""
    own = str(Path(barnraise.__file__).resolve().parents[1])
    sites = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        sites.add(site.getusersitepackages())
    # Ours comes first: a site folder may hold an older installation.
    return list(dict.fromkeys([own, *(path for path in sys.path if path in sites)]))


def _python_in(environment: Path) -> Path:
    return environment / "Scripts" / "python.exe" if _WINDOWS else environment / "bin" / "python"


def _key(plan: EnvironmentPlan) -> str:
    parts = [
        plan.digest,
        platform.python_version(),
        sysconfig.get_platform(),
        barnraise.__version__,
        *_agent_places(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


async def _locked(path: Path, on_progress: Progress) -> FileLock:
    """Wait for the lock, so that two runs with the same environment build it once."""
    lock = FileLock(path)
    was_reported = False
    while not lock.try_acquire():
        if not was_reported:
            on_progress("waiting for another run that builds the same environment")
            was_reported = True
        await asyncio.sleep(_POLL_S)
    return lock


def _complete_python(pointer: Path) -> Path | None:
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not name.startswith(f"{pointer.stem}.") or Path(name).name != name:
        return None
    python = _python_in(pointer.parent / name)
    # Also None if its base Python was removed.
    return python if python.exists() else None


def _write_pointer(pointer: Path, python: Path) -> None:
    write_atomically(pointer, python.parents[1].name.encode(), shared=True)


def _sweep(target_root: Path, key: str) -> None:
    """Remove the leftovers of killed builds; the lock ensures that no build is running."""
    pointer = target_root / f"{key}.whole"
    pointer.unlink(missing_ok=True)
    for leftover in target_root.glob(f"{key}.*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        elif leftover.suffix != ".lock":
            leftover.unlink(missing_ok=True)
