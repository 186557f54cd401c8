"""Runs in containers of an engine that is a stand-in: a client on the path and, in this process, its daemon.

The daemon gives each container the mounts and variables that were asked for, and nothing else of the state
directory and the environment; its containers outlive the client, as those of a real one do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import barnraise
from barnraise.agent.containers import run as container_run
from barnraise.agent.containers.engine import ContainerEngine, parse_info, remove_leftovers
from barnraise.agent.containers.image import check_arguments, check_result
from barnraise.agent.containers.run import ContainerSpec, prepare_containers, run_command, translate_exit
from barnraise.agent.supervisor.messages import WorkerExited
from barnraise.agent_client.kv_client import agent_at, ask_cluster
from barnraise.core.errors import BarnraiseError, RunEnvironmentError
from barnraise.environments.build_process import run_to_end
from barnraise.environments.installed_packages import packages_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers are for Linux")

SOURCE = str(Path(barnraise.__file__).parents[1])
IMAGE = "me/trainer:1"
CLIENT = """#!{python} -I
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({socket!r})
signal.signal(signal.SIGTERM, lambda *_: connection.sendall(b"T"))
message = json.dumps([sys.argv[1:], dict(os.environ), os.getpid()]).encode()
socket.send_fds(connection, [len(message).to_bytes(4, "big")], [0, 1, 2])
connection.sendall(message)
sys.exit(int(connection.recv(100) or b"125"))
"""


def _can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif(not _can_mount(), reason="the stand-in needs mount namespaces")


class StandIn:
    """A daemon of containers, and the folder of its client."""

    def __init__(self, room: Path) -> None:
        self.path = room / "bin"
        self.path.mkdir()
        self.calls: list[list[str]] = []
        self.images = {IMAGE}
        self.info = " Security Options:\n  seccomp\n"
        self.answer: tuple[str, int] | None = None  # instead of running anything
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.labels: dict[str, set[str]] = {}
        self.clients: dict[str, int] = {}
        self._image = room / "image"
        self._image.mkdir()
        (self._image / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (self._image / "python").chmod(0o755)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(room / "engine.sock"))
        self._server.listen()
        client = self.path / "docker"
        client.write_text(CLIENT.format(python=sys.executable, socket=str(room / "engine.sock")))
        client.chmod(0o755)
        self._serving = threading.Thread(target=self._serve, daemon=True)
        self._serving.start()

    def close(self) -> None:
        # Else it waits on, and may take the calls of a later test, whose socket has the same number.
        self._server.shutdown(socket.SHUT_RDWR)
        self._serving.join(60)
        self._server.close()
        for process in list(self.running.values()):
            _kill(process)

    def of(self, verb: str) -> list[list[str]]:
        return [call for call in self.calls if call[0] == verb]

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        with connection:
            length, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
            stream = connection.makefile("rb")
            arguments, environment, client = json.loads(stream.read(int.from_bytes(length, "big")))
            self.calls.append(arguments)
            try:
                code = self._do(arguments, environment, client, descriptors, stream)
                connection.sendall(str(code).encode())
            except OSError:
                pass  # the client was killed
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _do(self, call, environment, client, descriptors, stream) -> int:  # type: ignore[no-untyped-def]
        def say(text: str) -> None:
            os.write(descriptors[1], text.encode() + b"\n")

        match call:
            case ["info"]:
                say(self.info)
                return 0 if self.info else 1
            case ["image", "inspect", image]:
                return 0 if image in self.images else 1
            case ["pull", image]:
                say(f"Pulling from {image}")
                if "nowhere" in image:
                    say("manifest unknown")
                    return 1
                self.images.add(image)
                return 0
            case ["ps", "--all", "--quiet", "--filter", wanted]:
                for name, labels in list(self.labels.items()):
                    if wanted.removeprefix("label=") in labels:
                        say(name)
                return 0
            case ["rm", "--force", *names]:
                return max(self._remove(name, say) for name in names)
            case ["run", *_]:
                if self.answer is not None:
                    say(self.answer[0])
                    return self.answer[1]
                return self._run(call, environment, client, descriptors, stream)
        return 125

    def _remove(self, name: str, say: Callable[[str], None]) -> int:
        process = self.running.get(name)
        if process is None:
            say(f"Error response from daemon: No such container: {name}")
            return 1
        _kill(process)
        while name in self.running:
            time.sleep(0.01)
        return 0

    def _run(self, call, environment, client, descriptors, stream) -> int:  # type: ignore[no-untyped-def]
        place = call.index(IMAGE)
        options, command = call[1:place], call[place + 1 :]

        def given(option: str) -> list[str]:
            return [after for word, after in itertools.pairwise(options) if word == option]

        name = given("--name")[0]
        variables = [word if "=" in word else f"{word}={environment[word]}" for word in given("--env")]
        fixed = [f"PATH={self._image}:/usr/bin:/bin", f"PYTHONPATH={SOURCE}"]
        label = next(one for one in given("--label") if one.startswith("barnraise.state="))
        steps = _mounts(label.partition("=")[2], given("--volume"))
        inside = shlex.join(["exec", "env", "-i", *fixed, *variables, *command])
        steps += [f"cd {shlex.quote(given('--workdir')[0])}", inside]
        process = subprocess.Popen(
            ["unshare", "-m", "sh", "-ec", "\n".join(steps)],
            stdin=descriptors[0],
            stdout=descriptors[1],
            stderr=descriptors[2],
            start_new_session=True,
        )
        self.running[name], self.clients[name] = process, client
        self.labels[name] = set(given("--label"))

        def pass_on() -> None:
            while stream.read(1) == b"T":
                process.send_signal(signal.SIGTERM)

        threading.Thread(target=pass_on, daemon=True).start()
        code = process.wait()
        del self.running[name], self.labels[name]
        return 128 - code if code < 0 else code


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ends by itself just now
        os.killpg(process.pid, signal.SIGKILL)


def _mounts(state: str, volumes: list[str]) -> list[str]:
    """Only what is asked for is there of the state directory."""
    kept = "/var/tmp"
    steps = [f"mount -t tmpfs none {kept}"]
    parts = [(volume.removesuffix(":ro").split(":"), volume.endswith(":ro")) for volume in volumes]
    for number, ((source, _), _) in enumerate(parts):
        make = "mkdir" if os.path.isdir(source) else "touch"
        steps += [f"{make} {kept}/{number}", f"mount --bind {shlex.quote(source)} {kept}/{number}"]
    steps += [f"mount -t tmpfs none {shlex.quote(state)}", "mount -t tmpfs none /run"]
    for number, ((source, target), read_only) in enumerate(parts):
        where = shlex.quote(target)
        made = f"mkdir -p {where}" if os.path.isdir(source) else f"touch {where}"
        steps += [made, f"mount --bind {kept}/{number} {where}"]
        if read_only:
            steps.append(f"mount -o remount,bind,ro {where}")
    return steps


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with tempfile.TemporaryDirectory(prefix="by-e-") as room:
        stand_in = StandIn(Path(room))
        monkeypatch.setenv("PATH", f"{stand_in.path}{os.pathsep}{os.environ['PATH']}")
        yield stand_in
        stand_in.close()


# What a container is given.

BOX = ContainerSpec(
    name="barnraise-train-ab12-1-0",
    run="train-ab12",
    state="/home/me/.local/state/barnraise",
    folder="/home/me/.local/state/barnraise/runs/train-ab12/folder",
    private_dir="/home/me/.local/state/barnraise/runs/train-ab12/rooms/1-0",
    data=("/data/mnist",),
    variables={"RANK": "0", "API_KEY": "a secret", "PATH": "/opt/bin", "DOCKER_HOST": "tcp://elsewhere"},
    user=1000,
    group=100,
)
CLIENTS = {"PATH": "/usr/bin", "HOME": "/home/me"}


def arguments(engine: ContainerEngine, box: ContainerSpec = BOX) -> tuple[str, ...]:
    return run_command(engine, box, IMAGE, ("python", "train.py", "--name=x"), CLIENTS)[0]


def changed(**changes: object) -> ContainerSpec:
    return replace(BOX, **changes)


def test_the_whole_command_line() -> None:
    state = BOX.state
    assert arguments(ContainerEngine("/usr/bin/docker")) == (
        *("/usr/bin/docker", "run", "--rm", "--init", "--pull=never", "--network=host", "--ipc=host"),
        *("--security-opt", "label=disable", "--user", "1000:100", "--name", "barnraise-train-ab12-1-0"),
        *("--label", f"barnraise.state={state}", "--label", "barnraise.run=train-ab12"),
        *("--workdir", BOX.folder, "--volume", f"{BOX.folder}:{BOX.folder}"),
        *("--volume", f"{BOX.private_dir}:/run/barnraise"),
        *("--volume", f"{state}/listener.sock:/run/barnraise/listener.sock"),
        *("--volume", "/data/mnist:/data/mnist:ro"),
        *("--env", "HOME=/run/barnraise", "--env", "USER", "--env", "RANK", "--env", "API_KEY"),
        *("--env", "PATH=/opt/bin", "--env", "DOCKER_HOST=tcp://elsewhere"),
        *(IMAGE, "python", "train.py", "--name=x"),
    )


def test_values_are_hidden_from_the_command_line_and_do_not_change_the_client() -> None:
    command, environment = run_command(ContainerEngine("docker"), BOX, IMAGE, ("python",), CLIENTS)
    assert "a secret" not in " ".join(command)
    assert environment["API_KEY"] == "a secret"
    assert {name: environment[name] for name in CLIENTS} == CLIENTS
    assert "DOCKER_HOST" not in environment


def test_the_user_of_a_container_is_the_user_of_the_machine_in_every_engine() -> None:
    docker, podman = (
        ContainerEngine("docker", rootless=True),
        ContainerEngine("podman", podman=True, rootless=True),
    )
    assert "0:0" in arguments(docker)
    assert "--userns=keep-id" not in arguments(docker)
    assert "1000:100" in arguments(podman)
    assert "--userns=keep-id" in arguments(podman)
    assert "--userns=keep-id" not in arguments(ContainerEngine("podman", podman=True))


def test_limits_and_devices() -> None:
    box = changed(memory_bytes=2 << 30, nice=19, cpus=frozenset({3, 1}), gpus=True)
    docker, podman = (
        arguments(ContainerEngine("docker"), box),
        arguments(ContainerEngine("podman", podman=True), box),
    )
    assert {"--memory=2147483648b", "--cpu-shares=15", "--cpuset-cpus=1,3", "--gpus=all"} <= set(docker)
    assert "--memory=2147483648b" in podman
    assert podman[podman.index("--device") + 1] == "nvidia.com/gpu=all"
    assert not any(word.startswith(("--cpu", "--gpus")) for word in podman)


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no client of Docker here")
def test_the_real_client_understands_it(tmp_path: Path) -> None:
    """It fails only because its daemon is nowhere."""
    box = changed(
        memory_bytes=2 << 30, nice=19, cpus=frozenset({0}), gpus=True, interactive=True, variables={}
    )
    environment = {"DOCKER_HOST": f"unix://{tmp_path}/nowhere", "DOCKER_CONFIG": str(tmp_path)}
    command = arguments(ContainerEngine(str(shutil.which("docker"))), box)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 125
    assert "Cannot connect to the Docker daemon" in done.stderr


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (" Security Options:\n  seccomp\n   Profile: builtin\n  cgroupns\n", ContainerEngine("x")),
        (" Security Options:\n  seccomp\n  rootless\n  cgroupns\n", ContainerEngine("x", rootless=True)),
        (
            "host:\n  conmon:\n    path: y\n  security:\n    rootless: false\n",
            ContainerEngine("x", podman=True),
        ),
        (
            "host:\n  conmon:\n    path: y\n  security:\n    rootless: true\n",
            ContainerEngine("x", True, True),
        ),
    ],
)
def test_an_engine_is_known_by_what_it_says(info: str, expected: ContainerEngine) -> None:
    assert parse_info("x", info) == expected


@pytest.mark.parametrize("image", ["", "--privileged", "-v/:/host", "a b", "a\nb", "a,b", "ä"])
def test_an_image_is_never_an_option(image: str) -> None:
    with pytest.raises(RunEnvironmentError, match="is not the name of an image"):
        check_arguments(image, ())


def test_names_of_images_and_paths() -> None:
    check_arguments("registry.local:5000/Team/trainer@sha256:abc", ("/data/a b",))
    for path in ("/data:ro", "data"):
        with pytest.raises(RunEnvironmentError, match="cannot mount"):
            check_arguments(IMAGE, (path,))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, (0, None)),
        (1, (1, None)),
        (125, (125, None)),
        (137, (None, 9)),
        (143, (None, 15)),
        (255, (255, None)),
    ],
)
def test_a_signal_in_a_container_is_told_as_one(code: int, expected: tuple[int | None, int | None]) -> None:
    told = translate_exit(WorkerExited(0, code, None, 0.0, b""))
    assert (told.code, told.signal) == expected
    killed = WorkerExited(0, None, 9, 0.0, b"")
    assert translate_exit(killed) == killed


HERE = f"barnraise {barnraise.__version__}"


@pytest.mark.parametrize(
    ("code", "lines", "words", "mend"),
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
def test_an_image_that_does_not_fit_is_refused(code: int, lines: list[str], words: str, mend: str) -> None:
    with pytest.raises(RunEnvironmentError, match=re.escape(words)) as raised:
        check_result(IMAGE, code, lines)
    assert mend in raised.value.hint


def test_an_image_that_fits_is_taken() -> None:
    check_result(IMAGE, 0, ["a banner of the image", HERE, "agent answers"])


# Before anything starts.


def ready(state: Path, image: str = IMAGE, told: list[str] | None = None) -> None:
    home = state / "runs" / "r"
    (home / "folder").mkdir(parents=True, exist_ok=True)
    asyncio.run(
        prepare_containers(
            image,
            "r",
            state=state,
            home=home,
            data={},
            variables={},
            gpus=False,
            on_progress=(told if told is not None else []).append,
        )
    )


def test_a_machine_without_engines_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunEnvironmentError, match="neither Docker nor Podman") as raised:
        ready(tmp_path)
    assert "sudo apt install podman" in raised.value.hint


def test_docker_that_is_not_at_work_gives_way_to_podman(
    engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.info = ""
    monkeypatch.setenv("PATH", str(engine.path))
    with pytest.raises(RunEnvironmentError, match="not running or this user may not use it") as raised:
        ready(tmp_path)
    assert raised.value.hint.endswith("docker info")
    podman = engine.path / "podman"
    podman.write_text(f'#!/bin/sh\n[ "$1" = info ] && echo conmon: && exit 0\necho "$@" >> {tmp_path}/said\n')
    podman.chmod(0o755)
    with pytest.raises(RunEnvironmentError, match="does not have Barnraise"):
        ready(tmp_path)
    assert "run --rm --init" in (tmp_path / "said").read_text()


def test_an_image_that_is_not_here_is_pulled_or_named(engine: StandIn, tmp_path: Path) -> None:
    engine.answer = (f"{HERE}\nagent answers", 0)
    told: list[str] = []
    ready(tmp_path, "me/other:2", told)
    assert told[:2] == ["pulling the image me/other:2", "Pulling from me/other:2"]
    assert len(engine.of("pull")) == 1
    ready(tmp_path, "me/other:2")
    assert len(engine.of("pull")) == 1
    with pytest.raises(RunEnvironmentError, match=r"could not be pulled\n.*\n.*manifest unknown") as raised:
        ready(tmp_path, "nowhere/x")
    assert raised.value.hint.endswith("docker pull nowhere/x")


def test_the_check_leaves_no_container_even_if_it_takes_too_long(
    engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.answer = ("barnraise 0.0.1", 0)
    with pytest.raises(RunEnvironmentError, match=r"has Barnraise 0\.0\.1"):
        ready(tmp_path)
    assert engine.of("rm") == [["rm", "--force", "barnraise-r-check"]]
    monkeypatch.setattr(container_run, "_CHECK_S", 0.0)
    with pytest.raises(RunEnvironmentError, match="took longer"):
        ready(tmp_path)
    assert len(engine.of("rm")) == 2


def test_only_leftovers_of_this_state_directory_are_removed(engine: StandIn, tmp_path: Path) -> None:
    remove_leftovers(tmp_path)
    assert not engine.calls, "a machine that never had a container asks no engine"
    for name, state in (("mine", tmp_path), ("others", tmp_path / "other")):
        engine.running[name] = process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        engine.labels[name] = {f"barnraise.state={state}"}

        def bury(name: str = name, process: subprocess.Popen[bytes] = process) -> None:
            process.wait()
            del engine.running[name]

        threading.Thread(target=bury, daemon=True).start()
    note = tmp_path / "containers"
    note.write_text(str(engine.path / "docker"))
    remove_leftovers(tmp_path)
    assert set(engine.running) == {"others"}
    assert not note.exists()


def test_an_engine_that_fails_is_asked_again_at_the_next_start(tmp_path: Path) -> None:
    note = tmp_path / "containers"
    note.write_text("/bin/false")
    remove_leftovers(tmp_path)
    assert note.exists()


class WithoutSubprocesses(asyncio.SelectorEventLoop):
    """As the agent's loop on Windows."""

    async def _make_subprocess_transport(self, *arguments: object, **options: object) -> None:
        raise NotImplementedError


def test_a_loop_that_knows_no_subprocesses_is_enough(engine: StandIn, tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=WithoutSubprocesses) as runner:
        with pytest.raises(NotImplementedError):
            runner.run(asyncio.create_subprocess_exec("true"))
        assert runner.run(packages_of(Path(sys.executable), ["json"])).package("json") is not None
        said: list[str] = []
        assert runner.run(run_to_end(("echo", "a"), tmp_path, os.environ, said.append)) == (0, ["a"])
        assert said == ["a"]


# A lone agent, and runs as a person starts them.


class Alone:
    def __init__(self, room: Path, engine: StandIn) -> None:
        self.engine = engine
        self.state = room / "state"
        self._room = room
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
        self.environment = {
            **kept,
            "PYTHONPATH": SOURCE,
            "OF_THE_HOST": "1",
            "BARNRAISE_STATE_DIRECTORY": str(self.state),
            "BARNRAISE_NETWORK_PORT": port,
            "BARNRAISE_DISCOVERY_METHODS": "",
        }
        self.log = open(room / "log", "w+")  # noqa: SIM115  # closed with the agent
        command = [sys.executable, "-P", "-m", "barnraise.agent"]
        self.process = subprocess.Popen(command, env=self.environment, stdout=self.log, stderr=self.log)
        self.until(lambda: _world(self.state) == 1, "the agent answers")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(90)
        self.log.close()

    def until(self, truth: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not truth():
            if time.monotonic() > deadline:
                raise AssertionError(f"in vain: {what}\n{self.words()}")
            time.sleep(0.05)

    def run(self, script: str, *options: str, image: str = IMAGE) -> subprocess.CompletedProcess[str]:
        folder = self._room / "project"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(script)
        return self.type("run", "--container", image, *options, "train.py", "--lr", "0.1", folder=folder)

    def type(self, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "barnraise.cli.main", *words]
        try:
            return subprocess.run(
                command, env=self.environment, cwd=folder, capture_output=True, text=True, timeout=100
            )
        except subprocess.TimeoutExpired as error:
            asked = "\n".join(map(shlex.join, self.engine.calls))
            raise AssertionError(
                f"no end of {words}\n{error.stdout!r}\n{error.stderr!r}\n{asked}\n{self.words()}"
            ) from None

    def words(self) -> str:
        self.log.seek(0)
        return self.log.read()[-3000:]

    def worker(self) -> str:
        """The name of the worker's container, once it runs its script."""
        marks = self.state / "runs"
        self.until(lambda: bool(list(marks.glob("*/folder/begun"))), "the worker has begun")
        (name,) = self.engine.running
        return name


def _world(state: Path) -> int:
    try:
        return ask_cluster(agent_at(state)).world
    except BarnraiseError:
        return 0


@pytest.fixture
def alone(engine: StandIn) -> Iterator[Alone]:
    with tempfile.TemporaryDirectory(prefix="by-") as room:
        agent = Alone(Path(room), engine)
        yield agent
        agent.close()


WORKER = """
import os, pathlib, sys
import torch
import torch.distributed as dist
seen = sorted(path.name for path in pathlib.Path(sys.argv[0]).absolute().parents[3].iterdir())
print("state", seen)
print("inside", sorted(os.listdir("/run/barnraise")))
print("variables", "OF_THE_HOST" in os.environ, os.environ["HOME"], os.environ["GIVEN"], sys.argv[1:])
data = pathlib.Path(os.environ["BARNRAISE_DATA_SET"])
print("data", (data / "one").read_text())
try:
    (data / "two").write_text("")
except OSError as error:
    print("not written:", error.strerror)
dist.init_process_group("barnraise")
total = torch.ones(3)
dist.all_reduce(total)
print("sum", total.tolist())
open("model.txt", "w").write("made in a container")
"""


@needs_mounts
@pytest.mark.slow
def test_a_run_in_a_container_from_end_to_end(alone: Alone, tmp_path: Path) -> None:
    data = tmp_path / "set"
    data.mkdir()
    (data / "one").write_text("1")
    options = ("--data", f"set=@{data}", "--set", "GIVEN=a secret", "--memory", "2GB", "--quiet")
    done = alone.run(WORKER, *options)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "state ['runs']" in done.stdout
    assert "inside ['listener.sock']" in done.stdout
    assert "variables False /run/barnraise a secret ['--lr', '0.1']" in done.stdout
    assert "data 1" in done.stdout
    assert "not written: Read-only file system" in done.stdout
    assert "sum [1.0, 1.0, 1.0]" in done.stdout
    results = list((alone.state.parent / "project" / "barnraise-runs").glob("*/model.txt"))
    assert [path.read_text() for path in results] == ["made in a container"]
    checked, surveyed, worked = alone.engine.of("run")
    assert not any("a secret" in word or "node.key" in word for word in (*checked, *surveyed, *worked))
    assert "--memory=2000000000b" in worked
    assert any(word.startswith("--cpu-shares") for word in worked)
    assert not alone.engine.running


@needs_mounts
@pytest.mark.slow
def test_what_an_image_lacks_is_told_with_the_machine_before_anything_starts(alone: Alone) -> None:
    alone.engine.answer = ("ModuleNotFoundError: No module named 'barnraise'", 1)
    done = alone.run("print('started')")
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert re.search(rf"\S+: the image {IMAGE} does not have Barnraise", done.stderr), done.stderr
    assert "RUN pip install /barnraise" in done.stderr
    alone.engine.answer = None
    missing = alone.run("import no_such_package_here")
    assert missing.returncode != 0
    assert "no_such_package_here" in missing.stderr
    assert len(alone.engine.of("run")) == 3, "no worker was started"


SLEEPS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("begun", "w")
time.sleep(600)
"""


@needs_mounts
@pytest.mark.slow
def test_no_container_outlives_its_run(alone: Alone) -> None:
    started = alone.run(SLEEPS, "--detach")
    assert started.returncode == 0, started.stderr
    name = alone.worker()
    os.kill(alone.engine.clients[name], signal.SIGKILL)
    # The worker seems killed, so the run begins again, and the first container must be gone by then.
    alone.until(lambda: len(alone.engine.of("run")) == 4, "the worker is started again")
    assert name not in alone.engine.running
    alone.until(lambda: bool(alone.engine.running), "the second container runs")
    ((_, second),) = alone.engine.running.items()
    os.killpg(second.pid, signal.SIGKILL)  # as the kernel does when memory is short
    alone.until(lambda: len(alone.engine.of("run")) == 5, "a killed container is no error of the script")
    alone.until(lambda: bool(alone.engine.running), "the third container runs")
    stopped = alone.type("stop", started.stdout.split()[-1])
    assert stopped.returncode == 0, stopped.stderr
    alone.until(lambda: not alone.engine.running, "the last container is gone")


@needs_mounts
@pytest.mark.slow
def test_a_killed_agent_leaves_a_container_that_the_next_start_finds(alone: Alone) -> None:
    alone.run(SLEEPS, "--detach")
    name = alone.worker()
    alone.process.kill()
    alone.process.wait()
    alone.until(lambda: not _alive(alone.engine.clients[name]), "the client died with the agent")
    assert name in alone.engine.running
    remove_leftovers(alone.state)
    assert not alone.engine.running


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
