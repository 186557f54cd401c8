"""Command lines of containers, and runs in containers of a fake engine."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from barnraise.agent.containers import run as container_run
from barnraise.agent.containers.engine import ContainerEngine, remove_leftovers, variables_file
from barnraise.agent.containers.run import (
    ContainerSpec,
    prepare_containers,
    run_command,
    translate_exit,
    variables_text,
)
from barnraise.agent.supervisor.messages import WorkerExited
from barnraise.agent_client.kv_client import agent_at, ask_cluster
from barnraise.core.errors import BarnraiseError, RunEnvironmentError
from tests.unit.agent.containers.fake_engine import HERE, IMAGE, SOURCE, FakeEngine, needs_mounts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers work on Linux only")


SPEC = ContainerSpec(
    name="barnraise-train-ab12-1-0",
    run="train-ab12",
    state="/home/me/.local/state/barnraise",
    folder="/home/me/.local/state/barnraise/runs/train-ab12/folder",
    interface="/home/me/.local/state/barnraise/ipc/ab12cd",
    private_dir="/home/me/.local/state/barnraise/runs/train-ab12/rooms/1-0",
    data=("/data/mnist",),
    variables={"RANK": "0", "API_KEY": "a secret", "LD_PRELOAD": "evil.so", "TWO": "one\ntwo"},
    variables_file="/home/me/.local/state/barnraise/runs/train-ab12/rooms/1-0.variables",
    user=1000,
    group=100,
)


def arguments(engine: ContainerEngine, spec: ContainerSpec = SPEC) -> tuple[str, ...]:
    return run_command(engine, spec, IMAGE, ("python", "train.py", "--name=x"))


def changed(**changes: object) -> ContainerSpec:
    return replace(SPEC, **changes)


def test_run_command_docker_has_all_arguments() -> None:
    state = SPEC.state
    assert arguments(ContainerEngine("/usr/bin/docker")) == (
        *("/usr/bin/docker", "run", "--rm", "--init", "--pull=never", "--ipc=private"),
        *("--cap-drop=ALL", "--security-opt", "no-new-privileges", "--pids-limit=4096"),
        "--shm-size=1073741824b",
        *("--security-opt", "label=disable", "--user", "1000:100", "--name", "barnraise-train-ab12-1-0"),
        *("--label", f"barnraise.state={state}", "--label", "barnraise.run=train-ab12"),
        *("--workdir", SPEC.folder, "--volume", f"{SPEC.folder}:{SPEC.folder}"),
        *("--volume", f"{SPEC.private_dir}:/run/barnraise"),
        *("--volume", f"{SPEC.interface}/listener.sock:/run/barnraise/listener.sock"),
        *("--volume", f"{SPEC.interface}/dial.sock:/run/barnraise/dial.sock"),
        *("--volume", "/data/mnist:/data/mnist:ro"),
        *("--env-file", SPEC.variables_file, "--env", "TWO=one\ntwo"),
        *(IMAGE, "python", "train.py", "--name=x"),
    )


def test_variables_text_keeps_values_from_command_line_and_from_client() -> None:
    """Tries a variable that would load other code into the client of the engine."""
    assert "evil.so" not in " ".join(arguments(ContainerEngine("docker")))
    assert "a secret" not in " ".join(arguments(ContainerEngine("docker")))
    assert variables_text(SPEC).splitlines() == [
        "HOME=/run/barnraise",
        "USER=barnraise",
        "RANK=0",
        "API_KEY=a secret",
        "LD_PRELOAD=evil.so",
        "BARNRAISE_BROKER=/run/barnraise/dial.sock",
    ]


@pytest.mark.parametrize("name", ["A B", "#A", "A=B", "", "A\nB"])
def test_variables_text_of_unusable_name_raises(name: str) -> None:
    with pytest.raises(RunEnvironmentError, match="not the name of a variable"):
        variables_text(changed(variables={name: "x"}))


def test_run_command_user_is_machine_user_in_every_engine() -> None:
    docker, podman = (
        ContainerEngine("docker", rootless=True),
        ContainerEngine("podman", podman=True, rootless=True),
    )
    assert "0:0" in arguments(docker)
    assert "--userns=keep-id" not in arguments(docker)
    assert "1000:100" in arguments(podman)
    assert "--userns=keep-id" in arguments(podman)
    assert "--userns=keep-id" not in arguments(ContainerEngine("podman", podman=True))


def test_run_command_limits_and_devices_by_engine() -> None:
    spec = changed(memory_bytes=2 << 30, nice=19, cpus=frozenset({3, 1}), gpus=True)
    docker, podman = (
        arguments(ContainerEngine("docker"), spec),
        arguments(ContainerEngine("podman", podman=True), spec),
    )
    assert {"--memory=2147483648b", "--cpu-shares=15", "--cpuset-cpus=1,3", "--gpus=all"} <= set(docker)
    assert "--memory=2147483648b" in podman
    assert podman[podman.index("--device") + 1] == "nvidia.com/gpu=all"
    assert not any(word.startswith(("--cpu", "--gpus")) for word in podman)


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no client of Docker here")
def test_run_command_real_docker_client_parses_it(tmp_path: Path) -> None:
    """It fails only because its daemon is nowhere."""
    spec = changed(
        memory_bytes=2 << 30, nice=19, cpus=frozenset({0}), gpus=True, interactive=True, variables={}
    )
    spec = replace(spec, variables_file=str(tmp_path / "variables"))
    (tmp_path / "variables").write_text(variables_text(spec))
    environment = {"DOCKER_HOST": f"unix://{tmp_path}/nowhere", "DOCKER_CONFIG": str(tmp_path)}
    command = arguments(ContainerEngine(str(shutil.which("docker"))), spec)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 125
    assert "Cannot connect to the Docker daemon" in done.stderr


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
def test_translate_exit_code_above_128_is_signal(code: int, expected: tuple[int | None, int | None]) -> None:
    event = translate_exit(WorkerExited(0, code, None, 0.0, b""))
    assert (event.code, event.signal) == expected
    killed = WorkerExited(0, None, 9, 0.0, b"")
    assert translate_exit(killed) == killed


def ready(state: Path, image: str = IMAGE, progress: list[str] | None = None) -> None:
    home = state / "runs" / "r"
    (home / "folder").mkdir(parents=True, exist_ok=True)
    asyncio.run(
        prepare_containers(
            image,
            "r",
            state=state,
            home=home,
            interface=state / "ipc",
            data={},
            variables={},
            gpus=False,
            on_progress=(progress if progress is not None else []).append,
        )
    )


def test_choose_engine_without_engines_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunEnvironmentError, match="neither Docker nor Podman") as raised:
        ready(tmp_path)
    assert "sudo apt install podman" in raised.value.hint


def test_choose_engine_docker_not_running_uses_podman(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_prepare_missing_image_is_pulled_or_raises(engine: FakeEngine, tmp_path: Path) -> None:
    engine.answer = (f"{HERE}\nagent answers", 0)
    progress: list[str] = []
    ready(tmp_path, "me/other:2", progress)
    assert progress[:2] == ["pulling the image me/other:2", "Pulling from me/other:2"]
    assert len(engine.of("pull")) == 1
    ready(tmp_path, "me/other:2")
    assert len(engine.of("pull")) == 1
    with pytest.raises(RunEnvironmentError, match=r"could not be pulled\n.*\n.*manifest unknown") as raised:
        ready(tmp_path, "nowhere/x")
    assert raised.value.hint.endswith("docker pull nowhere/x")


def test_prepare_failed_check_removes_container(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.answer = ("barnraise 0.0.1", 0)
    with pytest.raises(RunEnvironmentError, match=r"has Barnraise 0\.0\.1"):
        ready(tmp_path)
    assert engine.of("rm") == [["rm", "--force", "barnraise-r-check"]]
    monkeypatch.setattr(container_run, "_CHECK_S", 0.0)
    with pytest.raises(RunEnvironmentError, match="took longer"):
        ready(tmp_path)
    assert len(engine.of("rm")) == 2


class LoneAgent:
    def __init__(self, room: Path, engine: FakeEngine) -> None:
        self.engine = engine
        self.state = room / "state"
        self._room = room
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
        (room / "config.toml").write_text("[runs]\ndata_paths = ['/tmp']\n")
        self.environment = {
            **kept,
            "BARNRAISE_CONFIG": str(room / "config.toml"),
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
                raise AssertionError(f"timed out: {what}\n{self.log_tail()}")
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
            commands = "\n".join(map(shlex.join, self.engine.calls))
            raise AssertionError(
                f"no end of {words}\n{error.stdout!r}\n{error.stderr!r}\n{commands}\n{self.log_tail()}"
            ) from None

    def log_tail(self) -> str:
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
def agent(engine: FakeEngine) -> Iterator[LoneAgent]:
    with tempfile.TemporaryDirectory(prefix="by-") as room:
        lone = LoneAgent(Path(room), engine)
        yield lone
        lone.close()


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
from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import PskRequest, encode
from barnraise.core.errors import BarnraiseError
with ListenerClient.connect(pathlib.Path(os.environ["BARNRAISE_STATE_DIRECTORY"])) as client:
    try:
        client.ask(encode(PskRequest("owner")), 30)
        print("has a key of the cluster")
    except BarnraiseError as error:
        print("refused:", error.message)
total = torch.ones(3)
dist.all_reduce(total)
print("sum", total.tolist())
open("model.txt", "w").write("made in a container")
"""


@needs_mounts
@pytest.mark.slow
def test_run_in_container_end_to_end(agent: LoneAgent, tmp_path: Path) -> None:
    data = tmp_path / "set"
    data.mkdir()
    (data / "one").write_text("1")
    options = ("--data", f"set=@{data}", "--set", "GIVEN=a secret", "--memory", "2GB", "--quiet")
    done = agent.run(WORKER, *options)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "state ['runs']" in done.stdout
    assert "inside ['dial.sock', 'listener.sock']" in done.stdout
    assert "variables False /run/barnraise a secret ['--lr', '0.1']" in done.stdout
    assert "data 1" in done.stdout
    assert "not written: Read-only file system" in done.stdout
    assert "refused: the agent rejects PskRequest of a worker of run" in done.stdout
    assert "sum [1.0, 1.0, 1.0]" in done.stdout
    results = list((agent.state.parent / "project" / "barnraise-runs").glob("*/model.txt"))
    assert [path.read_text() for path in results] == ["made in a container"]
    checked, surveyed, worked = agent.engine.of("run")
    assert not any("a secret" in word or "node.key" in word for word in (*checked, *surveyed, *worked))
    assert not any(f"{agent.state}/listener.sock" in word for word in (*checked, *surveyed, *worked))
    assert "--memory=2000000000b" in worked
    assert any(word.startswith("--cpu-shares") for word in worked)
    assert not agent.engine.running


@needs_mounts
@pytest.mark.slow
def test_run_with_unusable_image_fails_before_start(agent: LoneAgent) -> None:
    agent.engine.answer = ("ModuleNotFoundError: No module named 'barnraise'", 1)
    done = agent.run("print('started')")
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert re.search(rf"\S+: the image {IMAGE} does not have Barnraise", done.stderr), done.stderr
    assert "RUN pip install /barnraise" in done.stderr
    agent.engine.answer = None
    missing = agent.run("import no_such_package_here")
    assert missing.returncode != 0
    assert "no_such_package_here" in missing.stderr
    assert len(agent.engine.of("run")) == 3, "no worker was started"


SLEEPS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("begun", "w")
time.sleep(600)
"""


@needs_mounts
@pytest.mark.slow
def test_containers_do_not_outlive_run(agent: LoneAgent) -> None:
    started = agent.run(SLEEPS, "--detach")
    assert started.returncode == 0, started.stderr
    name = agent.worker()
    os.kill(agent.engine.clients[name], signal.SIGKILL)
    # The worker seems killed, so the run begins again, and the first container must be gone by then.
    agent.until(lambda: len(agent.engine.of("run")) == 4, "the worker is started again")
    assert name not in agent.engine.running
    agent.until(lambda: bool(agent.engine.running), "the second container runs")
    ((_, second),) = agent.engine.running.items()
    os.killpg(second.pid, signal.SIGKILL)  # as the kernel does when memory is short
    agent.until(lambda: len(agent.engine.of("run")) == 5, "a killed container is no error of the script")
    agent.until(lambda: bool(agent.engine.running), "the third container runs")
    stopped = agent.type("stop", started.stdout.split()[-1])
    assert stopped.returncode == 0, stopped.stderr
    agent.until(lambda: not agent.engine.running, "the last container is gone")


@needs_mounts
@pytest.mark.slow
def test_container_of_killed_agent_is_removed_at_next_start(agent: LoneAgent) -> None:
    agent.run(SLEEPS, "--detach")
    name = agent.worker()
    agent.process.kill()
    agent.process.wait()
    agent.until(lambda: not _alive(agent.engine.clients[name]), "the client died with the agent")
    assert name in agent.engine.running
    values = variables_file(agent.state, agent.state, name)
    assert values.exists() or not Path("/dev/shm").is_dir()
    remove_leftovers(agent.state)
    assert not agent.engine.running
    assert not values.exists(), "the values of variables stay behind"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
