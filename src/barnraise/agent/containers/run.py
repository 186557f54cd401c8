"""The worker containers of a run: what each is given, how it starts, and that none outlives the run.

A container sees the run's folder, its data sets (read-only), the local sockets of its run and a small private
directory. The private directory replaces the state directory, whose keys and socket a container never sees. A
container has the engine's own network, and none of the machine's environment variables. The broker of its run
opens its links to other machines.

The supervisor starts only the client of the engine. The client forwards SIGTERM, but a container survives the
death of its client. Code that stops workers must therefore remove their containers, too.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
from msgspec.structs import replace

from barnraise.agent.containers.engine import (
    STATE_LABEL,
    ContainerEngine,
    OnProgress,
    choose_engine,
    note_engine,
    remove_containers,
    run_program,
    variables_file,
)
from barnraise.agent.containers.image import (
    CHECK_PROGRAM,
    PYTHON,
    STATE_INSIDE,
    check_arguments,
    check_result,
    ensure_image,
)
from barnraise.agent.supervisor.messages import WorkerExited, WorkerLaunch, WorkerLimits
from barnraise.agent.supervisor.resource_limits import chosen_cpus
from barnraise.core.errors import RunEnvironmentError
from barnraise.environments import package_probe
from barnraise.environments.installed_packages import InstalledPackages, query_packages
from barnraise.identity.private_file import create_private
from barnraise.transport.ipc.dial_request import BROKER_NAME, BROKER_VARIABLE
from barnraise.transport.ipc.local_socket import SOCKET_NAME

_RUN_LABEL = "barnraise.run"
_CHECK_S = 180.0  # the first container of a large image is slow
_FULL_SHARES = 1024
_MOST_PROCESSES = 4096  # threads count, too: torch starts some for each core, and data loaders start more
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The mounts, variables and limits of one container."""

    name: str
    run: str
    state: str  # the state directory: it only labels the container
    folder: str
    interface: str  # the directory with the run's local socket
    private_dir: str  # mounted in place of the state directory
    variables_file: str = ""  # of the machine, not mounted
    data: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}
    user: int = 0
    group: int = 0
    workdir: str = ""  # empty: the folder
    shared_memory_bytes: int = 1 << 30  # for the data loaders of a script
    memory_bytes: int | None = None
    nice: int = 0
    cpus: frozenset[int] | None = None
    gpus: bool = False
    interactive: bool = False


def run_command(
    engine: ContainerEngine, spec: ContainerSpec, image: str, command: Sequence[str]
) -> tuple[str, ...]:
    """Return the command that starts a container. Pure.

    Its variables are in a private file. Every user of the machine can read a command line, and variables of a
    run must not change what the client of the engine does.
    """
    # In a user namespace of Docker's the machine's user is called root; Podman can keep its number.
    user = "0:0" if engine.rootless and not engine.podman else f"{spec.user}:{spec.group}"
    arguments = [
        # The engine's own network: the machine's loopback and its local sockets are not in it.
        *(engine.program, "run", "--rm", "--init", "--pull=never", "--ipc=private"),
        *("--cap-drop=ALL", "--security-opt", "no-new-privileges", f"--pids-limit={_MOST_PROCESSES}"),
        f"--shm-size={spec.shared_memory_bytes}b",
        # SELinux would keep a container from the run's sockets.
        *("--security-opt", "label=disable", "--user", user),
        *("--name", spec.name),
        *("--label", f"{STATE_LABEL}={spec.state}", "--label", f"{_RUN_LABEL}={spec.run}"),
        *("--workdir", spec.workdir or spec.folder),
        *("--volume", f"{spec.folder}:{spec.folder}", "--volume", f"{spec.private_dir}:{STATE_INSIDE}"),
    ]
    for name in (SOCKET_NAME, BROKER_NAME):
        arguments += ["--volume", f"{Path(spec.interface, name)}:{STATE_INSIDE}/{name}"]
    for path in spec.data:
        arguments += ["--volume", f"{path}:{path}:ro"]
    if engine.podman and engine.rootless:
        arguments.append("--userns=keep-id")
    if spec.interactive:
        arguments.append("--interactive")
    arguments += _limit_options(engine, spec)
    arguments += ["--env-file", spec.variables_file]
    for name, value in variables_of(spec).items():
        if "\n" in value:  # a line of the file is one variable
            arguments += ["--env", f"{name}={value}"]
    return (*arguments, image, *command)


def variables_of(spec: ContainerSpec) -> dict[str, str]:
    """Return the variables of a container; raise RunEnvironmentError for a name that a file would misread."""
    broker = f"{STATE_INSIDE}/{BROKER_NAME}"
    variables = {"HOME": STATE_INSIDE, "USER": "barnraise", **spec.variables, BROKER_VARIABLE: broker}
    for name in variables:
        if not _VARIABLE_NAME.fullmatch(name):
            raise RunEnvironmentError(
                f"{name!r} is not the name of a variable for a container",
                hint="Use letters, digits and underscores in --set NAME=VALUE.",
            )
    return variables


def variables_text(spec: ContainerSpec) -> str:
    """Return the content of the file of variables. Pure."""
    return "".join(f"{name}={value}\n" for name, value in variables_of(spec).items() if "\n" not in value)


def _limit_options(engine: ContainerEngine, spec: ContainerSpec) -> list[str]:
    options = []
    if spec.memory_bytes is not None:
        options.append(f"--memory={spec.memory_bytes}b")
    if not engine.podman:  # Podman's containers descend from the client, which the supervisor has limited
        if spec.nice:
            # The kernel's weights: a fourth more for each step.
            options.append(f"--cpu-shares={max(2, round(_FULL_SHARES / 1.25**spec.nice))}")
        if spec.cpus is not None:
            options.append(f"--cpuset-cpus={','.join(map(str, sorted(spec.cpus)))}")
    if spec.gpus:
        options += ["--device", "nvidia.com/gpu=all"] if engine.podman else ["--gpus=all"]
    return options


def translate_exit(event: WorkerExited) -> WorkerExited:
    """Return the event with a signal instead of the exit code 128 + signal that an engine reports. Pure."""
    number = (event.code or 0) - 128
    signals = {int(known) for known in signal.Signals}
    return replace(event, code=None, signal=number) if number in signals else event


class RunContainers:
    """The containers of one run on this machine; made by :func:`prepare_containers`."""

    def __init__(self, engine: ContainerEngine, image: str, template: ContainerSpec) -> None:
        self._engine = engine
        self._image = image
        self._template = template
        self._names: set[str] = set()

    async def packages(self, names: Sequence[str]) -> InstalledPackages:
        """Return the packages of the image's Python, for the comparison of machines."""
        spec = await asyncio.to_thread(self._make_spec, "survey", interactive=True, workdir=STATE_INSIDE)
        probe = Path(package_probe.__file__)
        await asyncio.to_thread(shutil.copyfile, probe, Path(spec.private_dir, probe.name))
        command = self._command(spec, (PYTHON, f"{STATE_INSIDE}/{probe.name}"))
        try:
            return await query_packages(
                command,
                names,
                whose=f"the Python of the image {self._image}",
                hint=f"See whether it starts: {Path(command[0]).name} run --rm {self._image} {PYTHON} -V",
                environment=os.environ,
                deadline_s=_CHECK_S,
            )
        finally:
            await self.remove()

    def wrap(self, worker: WorkerLaunch, generation: int, device: str, limits: WorkerLimits) -> WorkerLaunch:
        """Return the launch of the same worker in a container."""
        spec = self._make_spec(
            f"{generation}-{worker.rank}",
            variables=worker.environment,
            gpus=device.startswith("cuda"),
            memory_bytes=limits.memory_bytes,
            nice=limits.nice,
            cpus=_allowed_cpus(limits),
        )
        return replace(worker, command=self._command(spec, worker.command), environment=dict(os.environ))

    async def check(self) -> None:
        """Raise RunEnvironmentError unless the image has this Barnraise version and reaches the agent."""
        spec = await asyncio.to_thread(self._make_spec, "check", workdir=STATE_INSIDE)
        command = self._command(spec, (PYTHON, "-c", CHECK_PROGRAM))
        try:
            code, lines = await run_program(
                command, os.environ, _CHECK_S, f"checking the image {self._image}"
            )
        finally:
            await self.remove()
        check_result(self._image, code, lines)

    async def remove(self) -> None:
        """Remove all containers of the run, also those whose clients are gone."""
        await self._remove(sorted(self._names))

    async def remove_workers(self, generation: int, ranks: Iterable[int]) -> None:
        """Remove the containers of these workers of one generation."""
        await self._remove([f"{self._template.name}-{generation}-{rank}" for rank in ranks])

    async def _remove(self, names: Sequence[str]) -> None:
        self._names -= set(names)
        for name in names:
            self._variables_file(Path(self._template.private_dir, name), name).unlink(missing_ok=True)
        if names:
            await asyncio.to_thread(remove_containers, self._engine.program, names)

    def _make_spec(self, suffix: str, **more: object) -> ContainerSpec:
        """Return the template with a private directory of its own.

        Draft files are named by process id, and process ids repeat between containers.
        """
        private_dir = Path(self._template.private_dir, suffix)
        private_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for mount_point in (SOCKET_NAME, BROKER_NAME):  # made by the engine they would be root's
            (private_dir / mount_point).touch()
        name = f"{self._template.name}-{suffix}"
        file = self._variables_file(private_dir, name)
        spec = replace(
            self._template, name=name, private_dir=str(private_dir), variables_file=str(file), **more
        )
        file.unlink(missing_ok=True)
        create_private(file, variables_text(spec).encode())
        return spec

    def _variables_file(self, private_dir: Path, name: str) -> Path:
        return variables_file(Path(self._template.state), private_dir, name)

    def _command(self, spec: ContainerSpec, command: Sequence[str]) -> tuple[str, ...]:
        self._names.add(spec.name)
        return run_command(self._engine, spec, self._image, command)


async def prepare_containers(
    image: str,
    run: str,
    *,
    state: Path,
    home: Path,
    interface: Path,
    data: Mapping[str, str],
    variables: Mapping[str, str],
    gpus: bool,
    on_progress: OnProgress,
) -> RunContainers:
    """Choose the engine, pull the image and try it; raise RunEnvironmentError if no worker could start.

    ``home`` is the run's own directory, which has its ``folder``.
    """
    user, group = _own_user()
    check_arguments(image, (str(state), str(home), *data.values()))
    engine = await choose_engine()
    await asyncio.to_thread(note_engine, state, engine)
    await ensure_image(engine, image, on_progress)
    on_progress(f"trying the image {image}")
    template = ContainerSpec(
        name=f"barnraise-{run}",
        run=run,
        state=str(state),
        folder=str(home / "folder"),
        interface=str(interface),
        private_dir=str(home / "rooms"),
        data=tuple(dict.fromkeys(data.values())),
        variables=variables,
        user=user,
        group=group,
        gpus=gpus,
        shared_memory_bytes=psutil.virtual_memory().total // 2,  # as the system itself does
    )
    containers = RunContainers(engine, image, template)
    await containers.check()
    return containers


if sys.platform == "linux":

    def _own_user() -> tuple[int, int]:
        return os.getuid(), os.getgid()

    def _allowed_cpus(limits: WorkerLimits) -> frozenset[int] | None:
        return chosen_cpus(frozenset(os.sched_getaffinity(0)), limits)

else:

    def _own_user() -> tuple[int, int]:
        """Raise RunEnvironmentError: containers in a virtual machine do not reach the agent's socket."""
        raise RunEnvironmentError(
            "containers work on Linux only: in a virtual machine they cannot reach the agent",
            hint="Leave this machine out with `--on`, or run without --container.",
        )

    def _allowed_cpus(limits: WorkerLimits) -> frozenset[int] | None:
        return None
