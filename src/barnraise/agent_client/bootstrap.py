"""Starts a listener when this machine has none, exactly one however many workers ask at once."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

import barnraise
from barnraise.agent_client.client import ListenerClient
from barnraise.core.config import HostingSettings, NetworkSettings, Settings, state_directory
from barnraise.core.errors import ListenerError
from barnraise.core.file_lock import FileLock
from barnraise.core.logs.rotation import open_output
from barnraise.identity.private_file import private_directory
from barnraise.transport.ipc.messages import DialTicket, ListenerStanding

LOG_NAME = "listener.log"
AGENT_LOG = "agent.log"
_START_S = 60.0  # an old disk that has never read us before
_POLL_S = 0.02
_PROBE_S = 5.0
_ATTEMPTS = 3
_TAIL_BYTES = 2000
if sys.platform == "win32":
    _DETACHED_ON_WINDOWS = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
else:
    _DETACHED_ON_WINDOWS = 0

# Kept so that an ended listener does not stay behind as a zombie of a process that starts another.
_started: list[subprocess.Popen[bytes]] = []


def register_worker(settings: Settings, run: str, generation: int) -> tuple[ListenerClient, DialTicket]:
    """Make sure that there is a listener, and register there. A silent one is asked again for a while."""
    attempt, deadline = 1, time.monotonic() + _START_S
    while True:
        ensure_listener(settings)
        client: ListenerClient | None = None
        try:
            client = ListenerClient.connect(state_directory(settings))
            return client, client.register(run, generation)
        except ListenerError as error:
            if client is not None:
                client.close()
            if _is_silence(error) and time.monotonic() < deadline:
                continue
            # It may just have ended, being idle: the next one will not.
            if not _is_absence(error) or attempt == _ATTEMPTS:
                raise
            attempt += 1


def ensure_listener(settings: Settings) -> None:
    """Return once a listener answers at the state directory; start one that ends when idle if there is none.

    A listener that runs already keeps its own settings: its ticket says what they are.
    """
    directory = state_directory(settings)
    if _is_there(directory):
        return
    private_directory(directory)
    lock = FileLock(directory / "listener.start")
    if not lock.acquire(_START_S):
        raise ListenerError(
            f"another process has been starting the listener for {_START_S:g} s\n{_last_words(directory)}"
        )
    try:
        if not _is_there(directory):
            _start(settings, directory)
    finally:
        lock.release()


def start_agent(settings: Settings, options: Sequence[str] = ()) -> int | None:
    """Start this machine's agent in the background and return its process id once it answers.

    None if one runs already. A listener that only serves workers is left alone: ListenerError says so.
    """
    directory = private_directory(state_directory(settings))
    lock = FileLock(directory / "listener.start")
    if not lock.acquire(_START_S):
        raise ListenerError(f"another process has been starting the agent for {_START_S:g} s")
    try:
        standing = standing_of(directory)
        if standing is not None and standing.agent:
            return None
        if standing is not None:
            raise ListenerError(
                f"a listener without an agent serves {standing.workers} workers here (pid {standing.pid})",
                hint="Wait until those workers have stopped, then start the agent.",
            )
        _launch([sys.executable, "-P", "-m", "barnraise.agent", *options], directory, AGENT_LOG)
        standing = standing_of(directory)
        return standing.pid if standing is not None else None
    finally:
        lock.release()


def standing_of(directory: Path) -> ListenerStanding | None:
    """Return what the listener of this state directory reports of itself; None if none answers."""
    try:
        return _probe(directory)
    except ListenerError as error:
        if _is_absence(error):
            return None
        raise


def _probe(directory: Path) -> ListenerStanding:
    with ListenerClient.connect(directory, timeout=_PROBE_S) as client:
        return client.standing()


def _is_there(directory: Path) -> bool:
    """Tell whether a listener answers.

    Wait for one that is silent, because its machine may be busy. Another one could not start beside it.
    """
    deadline = time.monotonic() + _START_S
    while True:
        try:
            _probe(directory)
            return True
        except ListenerError as error:
            if not _is_absence(error):
                raise
            if not _is_silence(error) or time.monotonic() > deadline:
                return False


def _is_silence(error: ListenerError) -> bool:
    """Tell whether a listener is there and did not answer in time."""
    return isinstance(error.__cause__, TimeoutError)


def _is_absence(error: ListenerError) -> bool:
    """Tell whether no listener answered, in contrast to one that refused."""
    return isinstance(error.__cause__, OSError)


def _start(settings: Settings, directory: Path) -> None:
    _launch(_command(settings), directory, LOG_NAME)


def _launch(command: list[str], directory: Path, log_name: str) -> None:
    """Start a process of ours in the background and return once it answers."""
    what = "agent" if log_name == AGENT_LOG else "listener"
    _started[:] = [process for process in _started if process.poll() is None]
    with open_output(directory / log_name) as log:
        start = os.fstat(log.fileno()).st_size
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(),
            # A key press that stops one worker must not stop the listener of all.
            start_new_session=True,
            creationflags=_DETACHED_ON_WINDOWS,
        )
    _started.append(process)
    deadline = time.monotonic() + _START_S
    while standing_of(directory) is None:
        if process.poll() is not None:
            if standing_of(directory) is not None:  # the listener of another process was faster
                return
            words = _last_words(directory, log_name, start)
            raise ListenerError(f"the {what} stopped during its start; its output:\n{words}")
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            words = _last_words(directory, log_name, start)
            raise ListenerError(f"the {what} did not answer within {_START_S:g} s; its output:\n{words}")
        time.sleep(_POLL_S)


def _command(settings: Settings) -> list[str]:
    # The port goes by itself, because 0 (any) is no valid setting and still useful here.
    port = settings.network.port
    network = msgspec.structs.replace(settings.network, port=NetworkSettings().port)
    # Every user can read arguments, so the token of a hub's proxy is left out.
    public = msgspec.structs.replace(settings, network=network, hosting=HostingSettings())
    portable = msgspec.json.encode(public).decode()
    module = ["-m", "barnraise.transport.listener.listener"]
    # -P: a file of the user's that is called like a standard module must not stand in for it.
    return [sys.executable, "-P", *module, "--until-idle", "--port", str(port), "--settings", portable]


def child_environment() -> dict[str, str]:
    """Return an environment in which a child can import us, even from a source tree without install."""
    environment = dict(os.environ)
    root = str(Path(barnraise.__file__).parents[1])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, root])
    return environment


def _last_words(directory: Path, log_name: str = LOG_NAME, start: int = 0) -> str:
    """Return the end of a log, of what was written after its first ``start`` bytes."""
    try:
        text = (directory / log_name).read_bytes()[start:][-_TAIL_BYTES:].decode("utf-8", "replace").strip()
    except OSError:
        text = ""
    return text or "(nothing)"
