"""Builds a run's own environment from the lock or requirements file in its folder, once for each machine.

An environment is named by what it is built from (the files, this Python, the platform, this Barnraise), so
that a second run finds it. It is built under a name of its own and a small file points at it only when it is
whole: a killed build leaves nothing that looks whole, and installed commands keep the path they were
written for.

**What follows from the ``.pth`` file.** A built environment ends its search path with the folders from which
the agent itself was imported. So

- `barnraise` and what it depends on need not be in the lock, and are this very version (it is checked: a lock
  that names another one is refused);
- what the lock names wins, for us too: a lock with a numpy that is too old for Barnraise breaks Barnraise;
- what the lock forgets may still be found in the agent's environment, on one machine and not on the other:
  the comparison before the run shows it;
- the environment needs the agent's Python, hence is never built for another one, and it stops working when
  the agent's environment is removed.

**torch.** Where requirements name torch and no index, the index for this machine's devices is added to those
that the user configured, never put in their place. A lock decides alone: what it pins is what every machine
gets, so that on Windows a lock made from PyPI gives a torch without CUDA.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
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

__all__ = ["EnvironmentPlan", "Mode", "build", "plan_environment"]

Progress = Callable[[str], None]

# A torch with CUDA is some gigabytes, and some lines are slow.
_DEADLINE_S = 3600.0
_POLL_S = 0.1
_WINDOWS = sys.platform == "win32"
# The last in the alphabet: what the environment's own files add goes before ours.
_PTH_NAME = "zzz_barnraise_agent.pth"
# They would lead the tools to another environment than the one that is built.
_MISLEADING = (
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "UV_PROJECT_ENVIRONMENT"),
)
_CHECK = "import barnraise; print('barnraise', barnraise.__version__)"


async def build(
    plan: EnvironmentPlan,
    folder: Path,
    target_root: Path,
    on_progress: Progress,
    *,
    deadline_s: float = _DEADLINE_S,
) -> Path:
    """The Python of the environment: the agent's own, one that was built before, or one that is built now."""
    if plan.kind == "agent":
        return Path(sys.executable)
    key = _key(plan)
    pointer = target_root / f"{key}.whole"
    try:
        target_root.mkdir(parents=True, exist_ok=True)
        async with asyncio.timeout(deadline_s):
            lock = await _locked(target_root / f"{key}.lock", on_progress)
            try:
                python = _whole(pointer)
                if python is None:
                    await asyncio.to_thread(_sweep, target_root, key)
                    python = await _build_anew(plan, folder, target_root, key, on_progress)
                    _point(pointer, python)
            finally:
                lock.release()
    except TimeoutError:
        raise RunEnvironmentError(
            f"the environment was not built from {plan.source} within {deadline_s:g} s",
            hint="Run again: what was downloaded is kept by pip and uv; or check this machine's network.",
        ) from None
    except OSError as error:
        raise RunEnvironmentError(
            f"the environment cannot be kept in {target_root}: {error}",
            hint="Make room there, or make the folder writable for the agent, then run again.",
        ) from None
    return python


async def _build_anew(
    plan: EnvironmentPlan, folder: Path, target_root: Path, key: str, on_progress: Progress
) -> Path:
    environment = target_root / f"{key}.{secrets.token_hex(4)}"
    uv = _uv()
    if uv is None and plan.kind in ("uv.lock", "pylock.toml"):
        raise RunEnvironmentError(
            f"{plan.source} can only be read by uv, which this machine does not have",
            hint=f'Install it here with `"{sys.executable}" -m pip install uv`, or put a requirements.txt '
            f"into the folder in place of {plan.source}.",
        )
    on_progress(f"building an environment from {plan.source} with {'uv' if uv else 'venv and pip'}")
    index = choose_torch_here().index if plan.wants_torch_index else None
    steps = _uv_steps(uv, plan, environment, index) if uv else _pip_steps(plan, environment, index)
    whole = False
    try:
        for step in steps:
            await run_step(step, plan.source, folder, _tool_environment(step), on_progress)
        _fall_back_to_agent(environment)
        python = _python_in(environment)
        await _check(python, plan, folder)
        whole = True
        return python
    finally:
        if not whole:
            await asyncio.to_thread(shutil.rmtree, environment, ignore_errors=True)


def _uv() -> str | None:
    """On the path, or installed beside the agent, which a service does not have on its path."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def _uv_steps(uv: str, plan: EnvironmentPlan, environment: Path, index: str | None) -> list[BuildStep]:
    python = str(_python_in(environment))
    create = BuildStep((uv, "venv", "--no-project", "--python", sys.executable, str(environment)))
    if plan.kind == "uv.lock":
        # The folder's own code is imported from the folder: an install of it would outlive the folder.
        sync = (uv, "sync", "--frozen", "--no-install-workspace", "--python", sys.executable)
        return [create, BuildStep(sync, {"UV_PROJECT_ENVIRONMENT": str(environment)})]
    variables: dict[str, str] = {}
    if index is not None:
        # A variable, since an option would replace the user's own variable.
        others = os.environ.get("UV_EXTRA_INDEX_URL", "").split()
        variables["UV_EXTRA_INDEX_URL"] = " ".join([*others, index])
        # The index of torch has old copies of other packages, which the first match would take.
        variables["UV_INDEX_STRATEGY"] = os.environ.get("UV_INDEX_STRATEGY", "unsafe-best-match")
    install = (uv, "pip", "install", "--python", python, "-r", plan.source)
    return [create, BuildStep(install, variables)]


def _pip_steps(plan: EnvironmentPlan, environment: Path, index: str | None) -> list[BuildStep]:
    create = BuildStep((sys.executable, "-m", "venv", str(environment)))
    # pip appends this option to what its configuration says.
    extra = ("--extra-index-url", index) if index is not None else ()
    install = (str(_python_in(environment)), "-m", "pip", "install", *extra, "-r", plan.source)
    return [create, BuildStep(install)]


def _tool_environment(step: BuildStep) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    quiet = {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **quiet, **step.variables}


async def _check(python: Path, plan: EnvironmentPlan, folder: Path) -> None:
    """The environment must import this very Barnraise."""
    said: list[str] = []
    step = BuildStep((str(python), "-P", "-c", _CHECK))
    await run_step(step, plan.source, folder, _tool_environment(step), said.append, every_line=True)
    if f"barnraise {barnraise.__version__}" not in said:
        other = said[-1] if said else "nothing"
        raise RunEnvironmentError(
            f"{plan.source} brings {other}, and this machine runs barnraise {barnraise.__version__}",
            hint=f"Remove barnraise from {plan.source}: a run brings its own.",
        )


def _fall_back_to_agent(environment: Path) -> None:
    places = sysconfig.get_path(
        "purelib", scheme="venv", vars={"base": str(environment), "platbase": str(environment)}
    )
    # As a statement, since Pythons differ in the encoding that they read plain lines of such a file with.
    line = f"import sys; sys.path += {_agent_places()!a}\n"
    (Path(places) / _PTH_NAME).write_text(line, encoding="ascii")


def _agent_places() -> list[str]:
    """The folders from which the agent's Barnraise and what it depends on come, in the order of its path."""
    own = str(Path(barnraise.__file__).resolve().parents[1])
    sites = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        sites.add(site.getusersitepackages())
    # Ours goes first: an older install of it may lie in a site folder behind a source tree.
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
    """Two runs that need the same environment build it once."""
    lock = FileLock(path)
    said = False
    while not lock.try_acquire():
        if not said:
            on_progress("waiting for another run that builds the same environment")
            said = True
        await asyncio.sleep(_POLL_S)
    return lock


def _whole(pointer: Path) -> Path | None:
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not name.startswith(f"{pointer.stem}.") or Path(name).name != name:
        return None
    python = _python_in(pointer.parent / name)
    # False too if the Python that it leads to was removed.
    return python if python.exists() else None


def _point(pointer: Path, python: Path) -> None:
    write_atomically(pointer, python.parents[1].name.encode(), shared=True)


def _sweep(target_root: Path, key: str) -> None:
    """Remove what builds that were killed left behind; the lock says that nobody builds now."""
    pointer = target_root / f"{key}.whole"
    pointer.unlink(missing_ok=True)
    for left in target_root.glob(f"{key}.*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        elif left.suffix != ".lock":
            left.unlink(missing_ok=True)
