"""Sandbox of a hub's script on this machine: its folder, its credentials, and a broker to the hub."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from barnraise.core.config import CONFIG_VARIABLE, Settings, default_config_path, state_directory
from barnraise.core.host.metered import METERED, METERED_EVERY_S, METERED_VARIABLE, is_metered
from barnraise.hub.client.credentials import VARIABLE
from barnraise.hub.object_store.redirects import allowed_networks
from barnraise.sandbox.choice import find_sandbox, sandboxed
from barnraise.sandbox.spec import SandboxCommand, SandboxSpec, python_roots
from barnraise.transport.addresses import Where, network_of
from barnraise.transport.ipc.dial_broker import WEB_PORTS, DialBroker, DialRules, Place

if TYPE_CHECKING:
    from barnraise.cli.hub.join import JoinedHub

_PORTS = {"http": 80, "https": 443}
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # by which this machine verifies a hub's proxy


def rules_for(addresses: Sequence[str], store: str | None, led_from: Where | None = None) -> DialRules:
    """Return the places that a hub's script may reach: the hub, its accepted store and public web pages.

    A hub's name may lead to this machine or its network only if it does so now: names can change later.
    ``led_from``: the network of the hub that named the addresses of a region.
    """
    named: dict[Place, frozenset[Where]] = {}
    for address in addresses:
        host, port, scheme = _place(address)
        networks = _networks(host)
        named[host, port] = networks if led_from is None else networks & allowed_networks(led_from, scheme)
    if store is not None:
        host, port, scheme = _place(store)
        hub_networks = frozenset[Where]().union(*(_networks(_place(address)[0]) for address in addresses))
        allowed = frozenset[Where]().union(*(allowed_networks(where, scheme) for where in hub_networks))
        named[host, port] = named.get((host, port), frozenset()) | allowed
    return DialRules(named=named, public_ports=WEB_PORTS)


def _place(address: str) -> tuple[str, int, str]:
    url = httpx.URL(address)
    return url.host, url.port or _PORTS.get(url.scheme, 443), url.scheme


def _networks(host: str) -> frozenset[Where]:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset({"internet"})
    return frozenset(network_of(str(info[4][0])) for info in infos) - {"nowhere"}


@contextlib.contextmanager
def script_sandbox(
    contributor: JoinedHub, given: Mapping[str, str], settings: Settings
) -> Iterator[SandboxCommand]:
    """Serve the script's connections while it runs, and yield the command that starts it.

    ``given``: the script's own variables.
    """
    seat = contributor.credentials
    with tempfile.TemporaryDirectory(prefix="by-") as directory:
        broker = DialBroker(Path(directory), lambda: rules)
        config = os.environ.get(CONFIG_VARIABLE) or str(default_config_path())
        certificates = {
            name: path for name in _CERTIFICATES if os.path.exists(path := os.environ.get(name, ""))
        }
        spec = SandboxSpec(
            root=str(contributor.workspace / "sandbox"),
            directory=str(contributor.folder),
            writable=(str(contributor.folder), seat.folder),
            readable=(
                *python_roots(Path(sys.executable)),
                given[VARIABLE],
                directory,  # not writable: this process writes there, and must not follow a link
                *((config,) if os.path.isfile(config) else ()),
                *certificates.values(),
            ),
            hidden=(str(Path.home()), str(state_directory(settings))),
            broker=str(broker.path),
        )
        note = Path(directory, "metered")
        variables = {**given, **certificates, METERED_VARIABLE: str(note)}
        if os.path.isfile(config):
            variables[CONFIG_VARIABLE] = config
        command = (sys.executable, *contributor.command)
        wrapped = sandboxed(find_sandbox(), spec, command, os.environ, variables)
        rules = rules_for(seat.addresses, seat.store, seat.led_from)
        broker.start()
        watch = asyncio.get_running_loop().create_task(_note_metered(note))
        try:
            yield wrapped
        finally:
            watch.cancel()
            broker.close()


async def _note_metered(note: Path) -> None:
    """Write down whether the connection is metered, for the script that cannot ask the system."""
    while True:
        note.write_text(METERED if await asyncio.to_thread(is_metered) else "", encoding="ascii")
        await asyncio.sleep(METERED_EVERY_S)
