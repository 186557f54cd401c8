"""Checks of the doctor about peers and links, which only the agent sees. Pure functions of facts.

A failure names the peer, the cause and the command that fixes it; ``docs/doctor`` has a page for each name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from barnraise.agent.diagnostics.interfaces import CABLE, NAMES, WORSE, Interface
from barnraise.agent.diagnostics.reachability import DialResult
from barnraise.agent_client.cluster_requests import CheckRow
from barnraise.core.installation import upgrade_hint

CHECKS = (
    "cloned-key",
    "clock",
    "discovery",
    "fork",
    "interface",
    "local-network",
    "notifications",
    "quorum",
    "reach",
    "stalls",
    "versions",
)
_CLOCK_S = 120.0
LEAST_FREE_BYTES = 100 * 2**20  # below it, the agent cannot keep its decisions
ENOUGH_FREE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class DialPath:
    """One dialled address of a peer, and the local interface that leads there.

    ``direct``: the address is on the interface's own network.
    """

    dial: DialResult
    interface: Interface | None = None
    direct: bool = False


@dataclass(frozen=True)
class PeerFacts:
    """Everything that this machine knows about one other machine."""

    name: str
    port: int = 52416
    os: str = ""
    version: str = ""
    torch: str = ""
    in_view: bool = True
    linked: bool = True
    link_address: str = ""
    link_inbound: bool = False
    paths: tuple[DialPath, ...] = ()
    dial_backs: tuple[DialResult, ...] = ()
    dial_back_failure: str = ""
    failure: str = ""
    clock_ahead_s: float | None = None
    fork: str | None = None
    heard_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalFacts:
    """Name, port and versions of this machine."""

    name: str
    port: int = 52416
    os: str = "linux"
    version: str = "0.1.0"
    torch: str = ""


def reach(peer: PeerFacts, here: LocalFacts) -> CheckRow:
    """Check that each side can dial the other; if not, name the firewall to blame."""
    there = [path.dial for path in peer.paths]
    out = _answered(there)
    if not peer.linked:
        return _reach_unlinked(peer, there, out)
    inward = _answered(peer.dial_backs)
    if out is not None and (inward is not None or not peer.dial_backs):
        note = ""
        if inward is None and not peer.link_inbound:
            note = f"; whether it can dial back is not known: {peer.dial_back_failure or 'it was not asked'}"
        paths = "both directions" if not note else "it can be dialled"
        return CheckRow("reach", "ok", f"{paths}, {out.rtt_ms:.2g} ms at {out.address}{note}", peer=peer.name)
    if out is not None:
        return _one_way_in(peer, here)
    if inward is not None or peer.link_inbound:
        return _one_way_out(peer, there)
    return CheckRow(
        "reach",
        "warn",
        f"{peer.name} is connected, but a new connection failed: {_words(there) or 'no address known'}",
        f"Try again; if it fails again: {firewall_fix(peer.os, peer.port, peer.name)}",
        peer.name,
    )


def _one_way_in(peer: PeerFacts, here: LocalFacts) -> CheckRow:
    words = _words(peer.dial_backs)
    if all(dial.outcome == "forbidden" for dial in peer.dial_backs):
        cause, fix = f"a firewall on {peer.name} forbids its outgoing connections", _outgoing(peer.name)
    else:
        cause = f"most likely the firewall of this machine ({here.name}) blocks TCP port {here.port}"
        fix = firewall_fix(here.os, here.port, "")
    sentence = f"{peer.name} cannot dial this machine, but this machine can dial it: {cause} ({words})"
    return CheckRow("reach", "fail", sentence, fix, peer.name)


def _one_way_out(peer: PeerFacts, there: list[DialResult]) -> CheckRow:
    words = _words(there) or peer.failure or "no address of it is known"
    if there and all(dial.outcome == "forbidden" for dial in there):
        cause, fix = "a firewall on this machine forbids outgoing connections", _outgoing("")
    else:
        cause = f"most likely the firewall of {peer.name} blocks TCP port {peer.port}"
        fix = firewall_fix(peer.os, peer.port, peer.name)
    sentence = f"this machine cannot dial {peer.name}, but it can dial this machine: {cause} ({words})"
    return CheckRow("reach", "fail", sentence, fix, peer.name)


def _reach_unlinked(peer: PeerFacts, there: list[DialResult], out: DialResult | None) -> CheckRow:
    words = _words(there) or peer.failure
    others = ", ".join(peer.heard_by)
    if out is not None:
        return CheckRow(
            "reach",
            "warn",
            f"{peer.name} answers at {out.address}, but there is no connection to it yet",
            "Try again in a few seconds: barnraise status",
            peer.name,
        )
    if peer.heard_by:
        return CheckRow(
            "reach",
            "fail",
            f"{others} can reach {peer.name}, this machine cannot: {words or 'no address of it is known'}",
            f"Check the network between the two. {firewall_fix(peer.os, peer.port, peer.name)}",
            peer.name,
        )
    if any(dial.outcome == "other" for dial in there):
        return CheckRow(
            "reach",
            "warn",
            f"the machine that answers for {peer.name} is another one, or does not know this one: {words}",
            f"If {peer.name} was removed or reinstalled, pair it again: barnraise pair",
            peer.name,
        )
    if any(dial.outcome == "refused" for dial in there):
        return CheckRow(
            "reach",
            "warn",
            f"{peer.name} is on, but no agent listens there: {words}",
            f"On {peer.name}: barnraise up --detach",
            peer.name,
        )
    return CheckRow(
        "reach",
        "warn",
        f"{peer.name} is offline: it is off, asleep, on another network, or its firewall drops TCP port "
        f"{peer.port} ({words or 'no address of it is known'})",
        f"Wake it, and on it run: barnraise up --detach; then barnraise doctor there, too. "
        f"{firewall_fix(peer.os, peer.port, peer.name)}",
        peer.name,
    )


def interface(peer: PeerFacts) -> CheckRow | None:
    """Check that the connection uses the cable if there is one; return None without a connection."""
    used = next((path for path in peer.paths if path.dial.address == peer.link_address), None)
    if not peer.linked or used is None or used.interface is None:
        return None
    kind = used.interface.kind
    better = [path for path in peer.paths if _is_cable(path) and path is not used]
    answering = [path for path in better if path.dial.outcome == "answered"]
    name = f"{NAMES[kind]} ({used.interface.name}, {peer.link_address})"
    if kind not in WORSE or not better:
        return CheckRow("interface", "ok", f"the connection uses {name}", peer=peer.name)
    cable = (answering or better)[0]
    assert cable.interface is not None
    other = f"{NAMES[cable.interface.kind]} ({cable.interface.name}, {cable.dial.address})"
    if answering:
        return CheckRow(
            "interface",
            "warn",
            f"the connection to {peer.name} uses {name}, although {other} answers "
            f"in {cable.dial.rtt_ms:.2g} ms",
            "Restart the agent here: barnraise down, then barnraise up --detach",
            peer.name,
        )
    return CheckRow(
        "interface",
        "warn",
        f"the connection to {peer.name} uses {name}, because {other} does not work: {cable.dial.words}",
        f"Check the cable and the addresses on both ends, then: barnraise doctor on {peer.name}",
        peer.name,
    )


def versions(peer: PeerFacts, here: LocalFacts) -> CheckRow | None:
    """Compare versions; a gap is only a warning, because the protocol is negotiated."""
    gaps = []
    if peer.version and _minor(peer.version) != _minor(here.version):
        gaps.append(f"Barnraise {peer.version} there, {here.version} here")
    if peer.torch and here.torch and _minor(peer.torch) != _minor(here.torch):
        gaps.append(f"torch {peer.torch} there, {here.torch} here")
    if not gaps:
        version = f"Barnraise {peer.version}" if peer.version else ""
        return CheckRow("versions", "ok", version, peer=peer.name) if version else None
    return CheckRow(
        "versions",
        "warn",
        f"{peer.name} has different versions: {'; '.join(gaps)}",
        f"On the machine with the older one: {upgrade_hint()}; for torch: barnraise torch",
        peer.name,
    )


def clock(peer: PeerFacts) -> CheckRow | None:
    """Compare the clocks: nothing is decided by dates, but people read logs."""
    ahead = peer.clock_ahead_s
    if ahead is None:
        return None
    if abs(ahead) < _CLOCK_S:
        return CheckRow("clock", "ok", "within two minutes of ours", peer=peer.name)
    where = "ahead of" if ahead > 0 else "behind"
    return CheckRow(
        "clock",
        "warn",
        f"the clock of {peer.name} is {_duration(abs(ahead))} {where} this machine's, "
        "which makes logs hard to compare",
        f"On the machine with the wrong clock: {clock_fix(peer.os)}",
        peer.name,
    )


def fork(peer: PeerFacts) -> CheckRow | None:
    """Check that the peer has the same history under the same number."""
    if peer.fork is None:
        return None
    return CheckRow(
        "fork",
        "fail",
        f"{peer.name} has another {peer.fork} than this machine under the same number: its disk was "
        "restored or copied, so its history differs",
        f"Remove it and pair it again: barnraise unpair {peer.name}; there move the state directory away, "
        "then barnraise join",
        peer.name,
    )


def cloned_key(
    own_key: bytes, incarnation: bytes, dials: Iterable[DialResult], names: Mapping[bytes, str]
) -> CheckRow:
    """Check that no node key is used by two machines at once."""
    seen: dict[bytes, dict[bytes, str]] = {own_key: {incarnation: "here"}}
    for dial in dials:
        if dial.outcome == "answered":
            seen.setdefault(dial.node, {}).setdefault(dial.incarnation, dial.address)
    for node, incarnations in seen.items():
        if len(incarnations) > 1:
            name = names.get(node, "a machine")
            where = " and ".join(incarnations.values())
            return CheckRow(
                "cloned-key",
                "fail",
                f"two machines use the node key of {name} ({where}): one is a copy of the other, so each "
                "disconnects the other",
                "On the copy: barnraise down, delete node.key and the rest of its state directory (barnraise "
                "settings shows where), then barnraise up and barnraise join",
                "" if node == own_key else name,
            )
    return CheckRow("cloned-key", "ok", "no other machine answers with a key that is in use here")


def discovery(
    health: Mapping[str, str | None], strangers: Iterable[str] = ("mdns", "broadcast")
) -> list[CheckRow]:
    """Check every discovery method; it fails only if none is left that finds unknown machines."""
    paths = set(strangers)
    lost = all(health.get(name) is not None for name in paths)
    rows = []
    for name, trouble in health.items():
        if trouble is None:
            rows.append(CheckRow("discovery", "ok", f"{name} works"))
        else:
            words, fix = f"{name}: {trouble}", _discovery_fix(name)
            rows.append(CheckRow("discovery", "fail" if lost and name in paths else "warn", words, fix))
    return rows


def local_network(os: str, deaf: bool, paths: Iterable[DialPath]) -> CheckRow | None:
    """Check the local network permission of macOS, which blocks neighbours without a message."""
    if os != "macos":
        return None
    unreachable = [path.dial.address for path in paths if path.direct and path.dial.outcome == "unreachable"]
    answered = any(path.direct and path.dial.outcome == "answered" for path in paths)
    if answered or not (deaf or unreachable):
        return CheckRow("local-network", "ok", "macOS allows the agent to use the local network")
    signs = f"no route to {', '.join(unreachable[:3])}" if unreachable else "no mDNS packet arrives"
    return CheckRow(
        "local-network",
        "fail",
        f"macOS seems to block the agent from the local network ({signs})",
        "System Settings, Privacy & Security, Local Network: switch on the program that started the agent "
        "(your terminal, or Python for the service); then restart the agent",
    )


def quorum(decides: bool, online: int, voters: int, needed: tuple[str, ...]) -> CheckRow:
    """Check that enough voters are online to decide."""
    if decides:
        return CheckRow("quorum", "ok", f"{online} of {voters} voters are online")
    missing = f"one of {', '.join(needed)}" if len(needed) > 1 else ", ".join(needed) or "another voter"
    without = " ".join(f"--without {name}" for name in needed)
    return CheckRow(
        "quorum",
        "fail",
        f"only {online} of {voters} voters are online, so the cluster cannot decide: {missing} is missing",
        f"Start it (on it: barnraise up --detach); only if it will not return: barnraise continue {without}",
        needed[0] if len(needed) == 1 else "",
    )


def notifications(problem: str, *, has_targets: bool) -> CheckRow | None:
    """Check that the notices of this machine's runs are on its disk; ``problem``: why they are not."""
    if problem:
        fix = "Free some disk space, and let this user write there: barnraise settings shows the folder"
        return CheckRow("notifications", "warn", problem, fix)
    return CheckRow("notifications", "ok", "all notices are on the disk") if has_targets else None


def stalls(seconds: tuple[float, ...], up_s: float) -> CheckRow:
    """Check for pauses of this machine: sleep, a suspended process, an overloaded host."""
    if not seconds:
        return CheckRow("stalls", "ok", f"this machine was awake for all of the last {_duration(up_s)}")
    times = "once" if len(seconds) == 1 else f"{len(seconds)} times"
    return CheckRow(
        "stalls",
        "warn",
        f"this machine was asleep or stopped {times} in {_duration(up_s)}, at most for "
        f"{_duration(max(seconds))}",
        "If it should stay awake, see the check `sleep`; a virtual machine may need more processor time",
    )


def firewall_fix(os: str, port: int, machine: str) -> str:
    """Return the command that allows the port; ``machine`` empty: on this machine."""
    commands = {
        "linux": f"sudo ufw allow {port}/tcp, or with firewalld: sudo firewall-cmd --permanent "
        f"--add-port={port}/tcp && sudo firewall-cmd --reload",
        "macos": "System Settings, Network, Firewall, Options: allow incoming connections for Python",
        "windows": f'as administrator: netsh advfirewall firewall add rule name="Barnraise" dir=in '
        f"action=allow protocol=TCP localport={port} profile=private",
    }
    return f"{f'On {machine}' if machine else 'Here'}: {commands.get(os) or f'allow TCP port {port}'}"


def clock_fix(os: str) -> str:
    """Return the command that sets the clock of this operating system."""
    return {
        "linux": "sudo timedatectl set-ntp true",
        "macos": "sudo sntp -sS time.apple.com",
        "windows": "w32tm /resync",
    }.get(os, "set the clock by the network")


def _outgoing(machine: str) -> str:
    where = f"On {machine}" if machine else "Here"
    return f"{where}: allow outgoing TCP connections in the firewall (sudo nft list ruleset shows its rules)"


def _discovery_fix(name: str) -> str:
    if name == "mdns":
        return "Allow UDP port 5353; until then: barnraise join CODE --at HOST, or [network] peers"
    if name == "broadcast":
        return "Allow UDP port 52415, or give all machines another [network] discovery_port"
    return "Fix [network] peers in the settings: barnraise settings"


def _is_cable(path: DialPath) -> bool:
    return path.direct and path.interface is not None and path.interface.kind in CABLE


def _answered(dials: Iterable[DialResult]) -> DialResult | None:
    return min((dial for dial in dials if dial.outcome == "answered"), key=lambda k: k.rtt_ms, default=None)


def _words(dials: Iterable[DialResult]) -> str:
    return "; ".join(dial.words for dial in dials if dial.words)[:400]


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
