"""The sandbox of macOS: a profile for Seatbelt (``sandbox-exec``). Pure. It was never run.

The system's services stay reachable, because Metal needs many of them. Files of users, writes outside of the
script's folders, the network, signals and Apple events are denied. The only network is the proxy's port.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from barnraise.sandbox.spec import SandboxSpec

PROGRAM = "/usr/bin/sandbox-exec"
_PRIVATE = (
    "/Users",
    "/Volumes",
    "/private/var/root",
    "/Library/Keychains",
    "/private/tmp",
    "/private/var/tmp",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/dtracehelper")
_SERVICES = (
    "com.apple.SecurityServer",
    "com.apple.securityd.xpc",
    "com.apple.pasteboard.1",
    "com.apple.tccd",
)


def seatbelt_profile(spec: SandboxSpec, proxy_port: int) -> str:
    """Return the profile of a sandbox. Of several rules that match, the last one counts."""
    shown = (*spec.readable, *spec.writable, spec.home, spec.temporary)
    changed = (*spec.writable, spec.home, spec.temporary)
    rules = [
        "(version 1)",
        "(allow default)",
        _rule("deny file-read-data file-read-xattr", "subpath", (*_PRIVATE, *spec.hidden)),
        _rule("allow file-read*", "subpath", shown),
        "(deny file-write*)",
        _rule("allow file-write*", "literal", _DEVICES),
        _rule("allow file-write*", "subpath", changed),
        _rule("deny file-write*", "subpath", spec.protected),
        "(deny signal)",
        "(allow signal (target same-sandbox))",
        "(deny process-info*)",
        "(allow process-info* (target same-sandbox))",
        "(deny appleevent-send)",
        _rule("deny mach-lookup", "global-name", _SERVICES),
        "(deny network*)",
        _rule("allow network-outbound", "subpath", (*spec.writable, *_sockets(spec))),
        f'(allow network-bind network-inbound (local ip "localhost:{proxy_port}"))',
        f'(allow network-outbound (remote ip "localhost:{proxy_port}"))',
    ]
    return "\n".join(rule for rule in rules if rule)


def seatbelt_command(spec: SandboxSpec, command: Sequence[str], proxy_port: int) -> tuple[str, ...]:
    """Return the command line that runs ``command`` in a sandbox."""
    return (PROGRAM, "-p", seatbelt_profile(spec, proxy_port), *command)


def _sockets(spec: SandboxSpec) -> tuple[str, ...]:
    return (os.path.dirname(spec.broker),) if spec.broker else ()


def _rule(action: str, kind: str, values: Sequence[str]) -> str:
    if not values:
        return ""
    filters = " ".join(f'({kind} "{_quoted(value)}")' for value in dict.fromkeys(values))
    return f"({action} {filters})"


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
