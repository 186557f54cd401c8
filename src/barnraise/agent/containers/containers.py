"""Workers of a run in containers of Docker or Podman: which of them, whether the image fits, how each is
started, and that none is left.

A container sees the run's folder, its data sets (read-only), the agent's local socket, and a room: a small
folder of its own in place of the state directory, whose keys it never sees. It shares the machine's network
and shared memory, and has none of the machine's environment variables.

The program that the warden starts is only the client of the engine. It passes on a wish to end, but its own
death does not end the container: whoever ends workers removes their containers too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

import barnraise
from barnraise.agent.supervisor import messages as warden
from barnraise.agent.supervisor.limits import chosen_cpus
from barnraise.core.errors import RunEnvironmentError
from barnraise.core.installation import dockerfile_hint
from barnraise.environments import package_probe
from barnraise.environments.build_process import run_build_command
from barnraise.environments.installed_packages import InstalledPackages, query_packages
from barnraise.transport.ipc.local_socket import SOCKET_NAME

STATE_INSIDE = "/run/barnraise"
PYTHON = "python"  # whichever the image calls so
_STATE_LABEL = "barnraise.state"
_RUN_LABEL = "barnraise.run"
_NOTE_NAME = "containers"  # in the state directory: the program whose containers may be left
_ANYWHERE = Path(os.sep)
_SHORT_S = 30.0
_CHECK_S = 180.0  # the first container of a large image is slow
_PULL_S = 3600.0
_FULL_SHARES = 1024
_SHOWN_LINES = 4
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_ALREADY_GONE = re.compile(r"no such container|already in progress", re.IGNORECASE)
# Variables that would change what the client itself does.
_OF_THE_CLIENT = ("DOCKER", "BUILDKIT", "CONTAINER", "PODMAN", "XDG_", "LD_", "GODEBUG", "TMPDIR")
_CHECK = f"""\
import barnraise
print("barnraise", barnraise.__version__, flush=True)
from pathlib import Path
from barnraise.agent_client.bootstrap import standing_of
print("agent", "absent" if standing_of(Path({STATE_INSIDE!r})) is None else "answers")
"""

_log = logging.getLogger(__name__)

Progress = Callable[[str], None]


class ContainerEngine(msgspec.Struct, frozen=True):
    """A program that runs containers; one that is called docker may be Podman."""

    program: str
    podman: bool = False
    rootless: bool = False


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one container is given."""

    name: str
    run: str
    state: str  # the state directory, which only names whose container it is
    folder: str
    room: str
    data: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}
    user: int = 0
    group: int = 0
    workdir: str = ""  # the folder unless told
    memory_bytes: int | None = None
    nice: int = 0
    cpus: frozenset[int] | None = None
    gpus: bool = False
    interactive: bool = False


def run_command(
    engine: ContainerEngine, box: ContainerSpec, image: str, command: Sequence[str], client: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """What starts it, and the environment of that program. Pure; ``client`` is the machine's environment.

    Values go through the client's environment, since everybody on the machine can read a command line.
    """
    variables = {"HOME": STATE_INSIDE, "USER": "barnraise", **box.variables}
    open_names = {name for name in variables if name in client or name.startswith(_OF_THE_CLIENT)}
    # In a user namespace of Docker's the machine's user is called root; Podman can keep its number.
    person = "0:0" if engine.rootless and not engine.podman else f"{box.user}:{box.group}"
    arguments = [
        *(engine.program, "run", "--rm", "--init", "--pull=never", "--network=host", "--ipc=host"),
        # SELinux would keep a container from the agent's socket.
        *("--security-opt", "label=disable", "--user", person),
        *("--name", box.name, "--label", f"{_STATE_LABEL}={box.state}", "--label", f"{_RUN_LABEL}={box.run}"),
        *("--workdir", box.workdir or box.folder),
        *("--volume", f"{box.folder}:{box.folder}", "--volume", f"{box.room}:{STATE_INSIDE}"),
        *("--volume", f"{Path(box.state, SOCKET_NAME)}:{STATE_INSIDE}/{SOCKET_NAME}"),
    ]
    for path in box.data:
        arguments += ["--volume", f"{path}:{path}:ro"]
    if engine.podman and engine.rootless:
        arguments.append("--userns=keep-id")
    if box.interactive:
        arguments.append("--interactive")
    arguments += _limits(engine, box)
    for name, value in variables.items():
        arguments += ["--env", f"{name}={value}" if name in open_names else name]
    hidden = {name: value for name, value in variables.items() if name not in open_names}
    return (*arguments, image, *command), {**client, **hidden}


def _limits(engine: ContainerEngine, box: ContainerSpec) -> list[str]:
    options = []
    if box.memory_bytes is not None:
        options.append(f"--memory={box.memory_bytes}b")
    if not engine.podman:  # its containers descend from the client, which the warden has limited
        if box.nice:
            # As the kernel weighs it: a fourth more for each step.
            options.append(f"--cpu-shares={max(2, round(_FULL_SHARES / 1.25**box.nice))}")
        if box.cpus is not None:
            options.append(f"--cpuset-cpus={','.join(map(str, sorted(box.cpus)))}")
    if box.gpus:
        options += ["--device", "nvidia.com/gpu=all"] if engine.podman else ["--gpus=all"]
    return options


def told_end(event: warden.WorkerExited) -> warden.WorkerExited:
    """An engine tells a signal in the container as shells do: 128 and its number. Pure."""
    number = (event.code or 0) - 128
    known = {int(one) for one in signal.Signals}
    return replace(event, code=None, signal=number) if number in known else event


class RunContainers:
    """The containers of one run on this machine; made by :func:`make_ready`."""

    def __init__(self, engine: ContainerEngine, image: str, basis: ContainerSpec) -> None:
        self._engine = engine
        self._image = image
        self._basis = basis
        self._names: set[str] = set()

    async def packages(self, names: Sequence[str]) -> InstalledPackages:
        """What the image's Python has, for the comparison of machines."""
        box = await asyncio.to_thread(self._with_room, "survey", interactive=True, workdir=STATE_INSIDE)
        survey = Path(package_probe.__file__)
        await asyncio.to_thread(shutil.copyfile, survey, Path(box.room, survey.name))
        command, environment = self._command(box, (PYTHON, f"{STATE_INSIDE}/{survey.name}"))
        try:
            return await query_packages(
                command,
                names,
                whose=f"the Python of the image {self._image}",
                hint=f"See whether it starts: {Path(command[0]).name} run --rm {self._image} {PYTHON} -V",
                environment=environment,
                deadline_s=_CHECK_S,
            )
        finally:
            await self.remove()

    def ordered(
        self, worker: warden.WorkerLaunch, generation: int, device: str, limits: warden.WorkerLimits
    ) -> warden.WorkerLaunch:
        """The same worker, in a container."""
        box = self._with_room(
            f"{generation}-{worker.rank}",
            variables=worker.environment,
            gpus=device.startswith("cuda"),
            memory_bytes=limits.memory_bytes,
            nice=limits.nice,
            cpus=_cpus(limits),
        )
        command, environment = self._command(box, worker.command)
        return replace(worker, command=command, environment=environment)

    async def check(self) -> None:
        """The image has this very Barnraise, and a container of it reaches the agent."""
        box = await asyncio.to_thread(self._with_room, "check", workdir=STATE_INSIDE)
        command, environment = self._command(box, (PYTHON, "-c", _CHECK))
        try:
            code, lines = await _run(command, environment, _CHECK_S, f"checking the image {self._image}")
        finally:
            await self.remove()
        judge(self._image, code, lines)

    async def remove(self) -> None:
        """None of them is left, whatever became of their clients."""
        await self._remove(sorted(self._names))

    async def remove_workers(self, generation: int, ranks: Iterable[int]) -> None:
        """Those of one crew; another's go on."""
        await self._remove([f"{self._basis.name}-{generation}-{rank}" for rank in ranks])

    async def _remove(self, names: Sequence[str]) -> None:
        self._names -= set(names)
        if names:
            await asyncio.to_thread(_remove, self._engine.program, names)

    def _with_room(self, what: str, **more: object) -> ContainerSpec:
        """Each has a room of its own: process numbers, which drafts are called by, repeat in containers."""
        room = Path(self._basis.room, what)
        room.mkdir(parents=True, exist_ok=True, mode=0o700)
        (room / SOCKET_NAME).touch()  # where it is mounted: made by the engine it would be root's
        return replace(self._basis, name=f"{self._basis.name}-{what}", room=str(room), **more)

    def _command(self, box: ContainerSpec, command: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
        self._names.add(box.name)
        return run_command(self._engine, box, self._image, command, os.environ)


async def make_ready(
    image: str,
    run: str,
    *,
    state: Path,
    home: Path,
    data: Mapping[str, str],
    variables: Mapping[str, str],
    gpus: bool,
    on_progress: Progress,
) -> RunContainers:
    """Choose the engine, get the image and try it; RunEnvironmentError if no worker could start in it.

    ``home`` is the run's own directory, with its ``folder``.
    """
    user, group = _person()
    paths = (str(state), str(home), *data.values())
    check_words(image, paths)
    engine = await _chosen_engine()
    await asyncio.to_thread((state / _NOTE_NAME).write_text, engine.program, encoding="utf-8")
    if await _output(engine.program, "image", "inspect", image) is None:
        await _pull(engine, image, on_progress)
    on_progress(f"trying the image {image}")
    basis = ContainerSpec(
        name=f"barnraise-{run}",
        run=run,
        state=str(state),
        folder=str(home / "folder"),
        room=str(home / "rooms"),
        data=tuple(dict.fromkeys(data.values())),
        variables=variables,
        user=user,
        group=group,
        gpus=gpus,
    )
    contained = RunContainers(engine, image, basis)
    await contained.check()
    return contained


def check_words(image: str, paths: Sequence[str]) -> None:
    """What a command line would take for something else. Pure."""
    if not _IMAGE.fullmatch(image):
        raise RunEnvironmentError(
            f"{image!r} is not the name of an image",
            hint="Name it as `docker images` does, for example: --container me/trainer:1",
        )
    for path in paths:
        if ":" in path or not os.path.isabs(path):
            raise RunEnvironmentError(
                f"{path} cannot be shown to a container: its path must be absolute and without a colon",
                hint="Move or rename it, or run without --container.",
            )


def judge(image: str, code: int, lines: Sequence[str]) -> None:
    """RunEnvironmentError by what the check in the image said. Pure."""
    said = dict(line.split(" ", 1) for line in lines if re.fullmatch(r"(barnraise|agent) \S+", line))
    version, mine = said.get("barnraise"), barnraise.__version__
    mend = dockerfile_hint()
    last = "".join(f"\n    {line}" for line in lines[-_SHOWN_LINES:])
    if version is None and code == 125:
        hint = "Correct what the lines above name, then run again."
        if re.search(r"gpu|nvidia", last, re.IGNORECASE):
            hint = "Install the NVIDIA Container Toolkit on this machine, then restart its Docker or Podman."
        raise RunEnvironmentError(f"no container of the image {image} can be started{last}", hint=hint)
    if version is None:
        raise RunEnvironmentError(f"the image {image} does not have Barnraise{last}", hint=mend)
    if version != mine:
        raise RunEnvironmentError(
            f"the image {image} has Barnraise {version}, and this machine runs {mine}", hint=mend
        )
    if said.get("agent") != "answers":
        raise RunEnvironmentError(
            f"a container of the image {image} does not reach this machine's agent{last}",
            hint="Use Docker Engine or Podman of this system itself, without a virtual machine and without "
            "`userns-remap`, or run without --container.",
        )


def engine_of(program: str, info: str) -> ContainerEngine:
    """By what ``info`` tells; Podman is often installed under Docker's name. Pure."""
    podman = re.search(r"^\s*(conmon|buildahVersion):", info, re.MULTILINE) is not None
    rootless = re.search(r"^\s*rootless(: true)?\s*$", info, re.MULTILINE) is not None
    return ContainerEngine(program, podman, rootless)


async def _chosen_engine() -> ContainerEngine:
    """Docker before Podman, the first that is at work."""
    found = [program for program in map(shutil.which, ("docker", "podman")) if program is not None]
    for program in found:
        info = await _output(program, "info")
        if info is not None:
            return engine_of(program, info)
    if not found:
        raise RunEnvironmentError(
            "this machine has neither Docker nor Podman on its path",
            hint="Install one (for example: `sudo apt install podman`) and restart the agent, or leave this "
            "machine out with `--on`.",
        )
    raise RunEnvironmentError(
        f"{found[0]} is installed, but it is not at work or not for this user",
        hint=f"Start it and let this user use it until this succeeds: {Path(found[0]).name} info",
    )


async def _pull(engine: ContainerEngine, image: str, on_progress: Progress) -> None:
    on_progress(f"pulling the image {image}")
    command = (engine.program, "pull", image)
    code, lines = await _run(command, os.environ, _PULL_S, f"pulling the image {image}", on_progress)
    if code != 0:
        last = "".join(f"\n    {line}" for line in lines[-_SHOWN_LINES:])
        raise RunEnvironmentError(
            f"the image {image} is not on this machine and could not be pulled{last}",
            hint=f"Build it here, or see why this fails: {Path(engine.program).name} pull {image}",
        )


async def _output(program: str, *words: str) -> str | None:
    """What a short command says; None if it fails."""
    lines: list[str] = []
    try:
        async with asyncio.timeout(_SHORT_S):
            code, _ = await run_build_command((program, *words), _ANYWHERE, os.environ, lines.append)
    except (OSError, TimeoutError):
        return None
    return "\n".join(lines) if code == 0 else None


async def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    deadline_s: float,
    what: str,
    on_line: Progress = lambda _: None,
) -> tuple[int, list[str]]:
    try:
        async with asyncio.timeout(deadline_s):
            return await run_build_command(command, _ANYWHERE, environment, on_line)
    except TimeoutError:
        raise RunEnvironmentError(
            f"{what} took longer than {deadline_s:g} s",
            hint="Try it by hand on this machine, then run again.",
        ) from None
    except OSError as error:
        raise RunEnvironmentError(f"{what} failed: {command[0]} cannot be started ({error})") from None


def _short(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (program, *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_SHORT_S,
        check=False,
    )


def _remove(program: str, names: Sequence[str]) -> bool:
    """Whether none of them is left."""
    try:
        done = _short(program, "rm", "--force", *names)
        words = "" if done.returncode == 0 else done.stdout
    except (OSError, subprocess.SubprocessError) as error:
        words = str(error)
    held = [line for line in words.splitlines() if line not in names and not _ALREADY_GONE.search(line)]
    if held:
        _log.warning("containers may be left (%s): %s", ", ".join(names), held[-1])
    return not held


def remove_leftovers(state: Path) -> None:
    """The containers of an earlier start of this agent, which may have been killed; blocks for moments."""
    note = state / _NOTE_NAME
    try:
        program = note.read_text(encoding="utf-8")
        done = _short(program, "ps", "--all", "--quiet", "--filter", f"label={_STATE_LABEL}={state}")
    except FileNotFoundError:
        return  # no container was ever started, or its engine is gone
    except (OSError, UnicodeDecodeError, subprocess.SubprocessError) as error:
        _log.warning("containers of an earlier start may be left: %s", error)
        return
    left = done.stdout.split()
    if done.returncode != 0:
        _log.warning("containers of an earlier start may be left: %s", done.stdout.strip()[-200:])
    elif not left or _remove(program, left):
        note.unlink(missing_ok=True)


if sys.platform == "linux":

    def _person() -> tuple[int, int]:
        return os.getuid(), os.getgid()

    def _cpus(limits: warden.WorkerLimits) -> frozenset[int] | None:
        return chosen_cpus(frozenset(os.sched_getaffinity(0)), limits)

else:

    def _person() -> tuple[int, int]:
        """Elsewhere containers live in a virtual machine, where the agent's socket cannot be reached."""
        raise RunEnvironmentError(
            "containers are for Linux: elsewhere they run in a virtual machine and do not reach the agent",
            hint="Leave this machine out with `--on`, or run without --container.",
        )

    def _cpus(limits: warden.WorkerLimits) -> frozenset[int] | None:
        return None
