"""A fake container engine: a client on the path, and its daemon in this process.

The daemon gives each container only the requested mounts and variables. Its containers outlive the client, as
those of a real engine do.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import barnraise

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


class FakeEngine:
    """A daemon of containers, and the folder of its client."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bin"
        self.path.mkdir()
        self.calls: list[list[str]] = []
        self.images = {IMAGE}
        self.info = " Security Options:\n  seccomp\n"
        self.answer: tuple[str, int] | None = None  # instead of running anything
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.labels: dict[str, set[str]] = {}
        self.clients: dict[str, int] = {}
        self._image = folder / "image"
        self._image.mkdir()
        (self._image / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (self._image / "python").chmod(0o755)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(folder / "engine.sock"))
        self._server.listen()
        client = self.path / "docker"
        client.write_text(CLIENT.format(python=sys.executable, socket=str(folder / "engine.sock")))
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
        variables = [line for file in given("--env-file") for line in Path(file).read_text().splitlines()]
        variables += given("--env")
        fixed = [f"PATH={self._image}:/usr/bin:/bin", f"PYTHONPATH={SOURCE}"]
        label = next(word for word in given("--label") if word.startswith("barnraise.state="))
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


HERE = f"barnraise {barnraise.__version__}"
