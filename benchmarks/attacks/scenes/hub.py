"""A hub under attack: a real process behind a proxy that ends TLS, and friends that train on."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.invites import Invite
from barnraise.hub.protocol.messages import JoinRequest, JoinResponse, RoundConfig
from barnraise.hub.protocol.tls import server_context
from barnraise.hub.storage.create import hub_key
from barnraise.hub.storage.log import HubLog, MemberRecord
from barnraise.identity.keys import NodeKey
from benchmarks.agents.machines import NotInTimeError
from benchmarks.attacks.registry import undisturbed
from benchmarks.hub.emulated_members import Leaf, create_run, play_round
from benchmarks.hub.process import UNVERIFIED, HubProcess
from benchmarks.ranks.hosts import working_directory

NUMBERS = 8192
_TERMS = RoundConfig(round_s=1.0, grace=0.1, slack_s=30.0, chunk=2048)
_ROUND_S = 60.0
_FRIENDS = 2

T = TypeVar("T")
Look = Callable[[str, str, bytes], None]  # at the method, the path and the body of a request


class TlsEndingProxy(ThreadingHTTPServer):
    """Proxy with a key of its own, which sees every request in clear and passes it on."""

    daemon_threads = True

    def __init__(self, hub_port: int, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Passer)
        self.hub_port = hub_port
        self.look: Look = lambda method, path, body: None
        directory.mkdir()
        context = server_context(directory, hub_key(directory))
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.address = f"https://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Passer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TlsEndingProxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        self.server.look(self.command, self.path, body)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        line = http.client.HTTPSConnection(
            "127.0.0.1", self.server.hub_port, timeout=_ROUND_S, context=_unverified()
        )
        try:
            line.request(self.command, self.path, body or None, headers)
            response = line.getresponse()
            data = response.read()
        finally:
            line.close()
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("content-length", "connection"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        pass


def _unverified() -> ssl.SSLContext:
    """Return the context of a client that trusts the proxy, as one with a certificate of an authority."""
    return UNVERIFIED


class AttackedHubRun:
    """A hub whose friends train one round after the other, and a proxy in front of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = HubProcess(folder / "hub", _TERMS, name="attacked")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._leaves: list[Leaf] = []
        self._over = threading.Event()
        self._rounds = 0
        self._problem = ""

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Self]:
        """Start the hub, its proxy and its friends; stop them at the end."""
        with working_directory() as folder:
            scene = cls(folder)
            scene._thread.start()
            scene.hub.start()
            scene.proxy = TlsEndingProxy(scene.hub.port, folder / "proxy")
            training = asyncio.run_coroutine_threadsafe(scene._train(), scene._loop)
            try:
                scene._until_rounds(1)
                yield scene
            finally:
                scene._over.set()
                training.cancel()
                scene.proxy.shutdown()
                scene.proxy.server_close()
                scene.hub.kill()
                scene._close_loop()

    proxy: TlsEndingProxy

    def _close_loop(self) -> None:
        for leaf in self._leaves:
            self._loop.call_soon_threadsafe(leaf.wire.close)
        self._loop.call_soon_threadsafe(self._loop.call_later, 0.5, self._loop.stop)
        self._thread.join(_ROUND_S)
        self._loop.close()

    async def _train(self) -> None:
        owner = self.leaf(self.hub.invite("owner"), "owner", self.hub.owner)
        description = await create_run(owner, NUMBERS)
        friends = [self.leaf(self.hub.invite(), f"friend {number}") for number in range(_FRIENDS)]
        for friend in friends:
            await friend.join()
            friend.version = description.version
        while not self._over.is_set():
            played = await play_round(friends, description, NUMBERS, self._rounds)
            if played.counted < _FRIENDS:
                self._problem = f"updates of friends were refused: {played.refused}"
            self._rounds += 1

    def _until_rounds(self, count: int) -> None:
        deadline = time.monotonic() + 3 * _ROUND_S
        while self._rounds < count:
            if time.monotonic() > deadline:
                raise NotInTimeError(f"the friends made {self._rounds} of {count} rounds")
            time.sleep(0.05)

    @contextlib.contextmanager
    def honest_work(self) -> Iterator[None]:
        """Watch the friends of the hub during an attack."""
        before, self._problem = self._rounds, ""
        yield
        deadline = time.monotonic() + _ROUND_S
        while self._rounds < before + 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        undisturbed(self._rounds >= before + 2, "the friends' rounds stopped")
        undisturbed(not self._problem, self._problem)

    def restore(self) -> None:
        """Wait until the friends have made another round."""
        self._until_rounds(self._rounds + 1)

    # What an attacker needs.

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine beside the friends, and return its result."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(_ROUND_S)
        except TimeoutError:
            running.cancel()  # or it would disturb the attacks that follow
            raise

    def leaf(self, invite: Invite, name: str, key: NodeKey | None = None) -> Leaf:
        """Return a machine that has not joined yet; without a key it makes one."""
        leaf = Leaf(invite, name, key)
        self._leaves.append(leaf)
        return leaf

    def join(self, invite: Invite, name: str) -> Leaf:
        """Join with a key of its own; raise HubRefused with the hub's reason."""
        leaf = self.leaf(invite, name)
        self.run(leaf.join())
        return leaf

    def through_proxy(self, invite: Invite) -> Invite:
        return msgspec.structs.replace(invite, addresses=(self.proxy.address,), pinned=False)

    def refusal(self, leaf: Leaf, request: JoinRequest) -> str:
        """Send a request to join; return the kind of the refusal. An accepted one is a success."""
        try:
            self.run(leaf.ask("POST", "/v1/members", JoinResponse, request))
        except HubRefused as error:
            return error.kind
        raise AssertionError(f"it joined with the proof of another machine: {request.name}")

    def members(self) -> dict[str, MemberRecord]:
        log = HubLog(self.hub.directory)
        try:
            return {member.name: member for member in log.read().members.values()}
        finally:
            log.close()
