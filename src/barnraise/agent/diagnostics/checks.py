"""What the doctor concludes from what an agent sees: each check a small function over gathered facts. Pure.

A failure names the peer, the cause and the command that mends it; ``docs/doctor`` has a page for each name.
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
    "quorum",
    "reach",
    "stalls",
    "versions",
)
_CLOCK_S = 120.0


@dataclass(frozen=True)
class DialPath:
    """A door of a peer: what a dial gave, and our interface that leads there; ``direct``: on its network."""

    dial: DialResult
    interface: Interface | None = None
    direct: bool = False


@dataclass(frozen=True)
class PeerFacts:
    """One other machine, as this one finds it."""

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
    """This machine."""

    name: str
    port: int = 52416
    os: str = "linux"
    version: str = "0.1.0"
    torch: str = ""


def reach(peer: PeerFacts, here: LocalFacts) -> CheckRow:
    """Whether each side can dial the other now; if not, whose firewall it is."""
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
        f"{peer.name} is linked, but no new connection could be made: {_words(there) or 'no address known'}",
        f"Try again; if it stays so: {firewall_fix(peer.os, peer.port, peer.name)}",
        peer.name,
    )


def _one_way_in(peer: PeerFacts, here: LocalFacts) -> CheckRow:
    words = _words(peer.dial_backs)
    if all(dial.outcome == "forbidden" for dial in peer.dial_backs):
        cause, fix = f"a firewall on {peer.name} forbids its outgoing connections", _outgoing(peer.name)
    else:
        cause = f"most likely the firewall of this machine ({here.name}) does not let TCP port {here.port} in"
        fix = firewall_fix(here.os, here.port, "")
    sentence = f"{peer.name} cannot dial this machine, only the other way: {cause} ({words})"
    return CheckRow("reach", "fail", sentence, fix, peer.name)


def _one_way_out(peer: PeerFacts, there: list[DialResult]) -> CheckRow:
    words = _words(there) or peer.failure or "no address of it is known"
    if there and all(dial.outcome == "forbidden" for dial in there):
        cause, fix = "a firewall on this machine forbids outgoing connections", _outgoing("")
    else:
        cause = f"most likely the firewall of {peer.name} does not let TCP port {peer.port} in"
        fix = firewall_fix(peer.os, peer.port, peer.name)
    sentence = f"this machine cannot dial {peer.name}, only the other way: {cause} ({words})"
    return CheckRow("reach", "fail", sentence, fix, peer.name)


def _reach_unlinked(peer: PeerFacts, there: list[DialResult], out: DialResult | None) -> CheckRow:
    words = _words(there) or peer.failure
    others = ", ".join(peer.heard_by)
    if out is not None:
        return CheckRow(
            "reach",
            "warn",
            f"{peer.name} answers at {out.address}, but there is no link to it yet",
            "Look again in a few seconds: barnraise status",
            peer.name,
        )
    if peer.heard_by:
        return CheckRow(
            "reach",
            "fail",
            f"{others} can reach {peer.name}, this machine cannot: {words or 'no address of it is known'}",
            f"Look what is between the two. {firewall_fix(peer.os, peer.port, peer.name)}",
            peer.name,
        )
    if any(dial.outcome == "other" for dial in there):
        return CheckRow(
            "reach",
            "warn",
            f"whoever answers for {peer.name} is not it, or does not know this machine: {words}",
            f"If {peer.name} was removed or set up anew, pair it again: barnraise pair",
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
        f"{peer.name} is away: it is off, asleep, on another network, or its firewall drops TCP port "
        f"{peer.port} ({words or 'no address of it is known'})",
        f"Wake it, and on it run: barnraise up --detach; then barnraise doctor there, too. "
        f"{firewall_fix(peer.os, peer.port, peer.name)}",
        peer.name,
    )


def interface(peer: PeerFacts) -> CheckRow | None:
    """Whether the link takes the cable where there is one; None if there is no link to judge."""
    used = next((path for path in peer.paths if path.dial.address == peer.link_address), None)
    if not peer.linked or used is None or used.interface is None:
        return None
    kind = used.interface.kind
    better = [path for path in peer.paths if _is_cable(path) and path is not used]
    answering = [path for path in better if path.dial.outcome == "answered"]
    name = f"{NAMES[kind]} ({used.interface.name}, {peer.link_address})"
    if kind not in WORSE or not better:
        return CheckRow("interface", "ok", f"the link takes {name}", peer=peer.name)
    cable = (answering or better)[0]
    assert cable.interface is not None
    other = f"{NAMES[cable.interface.kind]} ({cable.interface.name}, {cable.dial.address})"
    if answering:
        return CheckRow(
            "interface",
            "warn",
            f"the link to {peer.name} takes {name}, although {other} answers in {cable.dial.rtt_ms:.2g} ms",
            "Choose again by a restart of the agent here: barnraise down, then barnraise up --detach",
            peer.name,
        )
    return CheckRow(
        "interface",
        "warn",
        f"the link to {peer.name} takes {name}, because {other} does not work: {cable.dial.words}",
        f"Look at the cable and at the addresses on both ends of it, then: barnraise doctor on {peer.name}",
        peer.name,
    )


def versions(peer: PeerFacts, here: LocalFacts) -> CheckRow | None:
    """Other versions work together as far as they speak one protocol, so a gap is never a failure."""
    gaps = []
    if peer.version and _minor(peer.version) != _minor(here.version):
        gaps.append(f"Barnraise {peer.version} there, {here.version} here")
    if peer.torch and here.torch and _minor(peer.torch) != _minor(here.torch):
        gaps.append(f"torch {peer.torch} there, {here.torch} here")
    if not gaps:
        found = f"Barnraise {peer.version}" if peer.version else ""
        return CheckRow("versions", "ok", found, peer=peer.name) if found else None
    return CheckRow(
        "versions",
        "warn",
        f"{peer.name} has other versions: {'; '.join(gaps)}",
        f"On the machine with the older one: {upgrade_hint()}; for torch: barnraise torch",
        peer.name,
    )


def clock(peer: PeerFacts) -> CheckRow | None:
    """Nothing is decided by dates, but people read logs."""
    ahead = peer.clock_ahead_s
    if ahead is None:
        return None
    if abs(ahead) < _CLOCK_S:
        return CheckRow("clock", "ok", "within two minutes of ours", peer=peer.name)
    where = "ahead of" if ahead > 0 else "behind"
    return CheckRow(
        "clock",
        "warn",
        f"the clock of {peer.name} is {_duration(abs(ahead))} {where} this machine's: logs will confuse",
        f"On the one that is wrong: {clock_fix(peer.os)}",
        peer.name,
    )


def fork(peer: PeerFacts) -> CheckRow | None:
    if peer.fork is None:
        return None
    return CheckRow(
        "fork",
        "fail",
        f"{peer.name} has another {peer.fork} than this machine under the same number: a disk was restored "
        "or copied, so that its history is not ours",
        f"Remove it and pair it again: barnraise unpair {peer.name}; there move the state directory away, "
        "then barnraise join",
        peer.name,
    )


def cloned_key(
    mine: bytes, incarnation: bytes, dials: Iterable[DialResult], names: Mapping[bytes, str]
) -> CheckRow:
    """One key on two machines: somebody answers with ours, or one node with two incarnations at once."""
    seen: dict[bytes, dict[bytes, str]] = {mine: {incarnation: "here"}}
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
                f"two machines use the node key of {name} ({where}): one is a copy of the other, and each "
                "throws the other out",
                "On the copy: barnraise down, delete node.key and the rest of its state directory (barnraise "
                "settings shows where), then barnraise up and barnraise join",
                "" if node == mine else name,
            )
    return CheckRow("cloned-key", "ok", "no other machine answers with a key that is in use here")


def discovery(
    health: Mapping[str, str | None], strangers: Iterable[str] = ("mdns", "broadcast")
) -> list[CheckRow]:
    """One row for each path; a failure only if no path is left that finds unknown machines."""
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
    """macOS forbids in silence: neighbours on one's own network are suddenly without a route."""
    if os != "macos":
        return None
    unreachable = [path.dial.address for path in paths if path.direct and path.dial.outcome == "unreachable"]
    answered = any(path.direct and path.dial.outcome == "answered" for path in paths)
    if answered or not (deaf or unreachable):
        return CheckRow("local-network", "ok", "macOS lets the agent use the local network")
    signs = f"no route to {', '.join(unreachable[:3])}" if unreachable else "no mDNS packet arrives"
    return CheckRow(
        "local-network",
        "fail",
        f"macOS seems to keep the agent from the local network ({signs})",
        "System Settings, Privacy & Security, Local Network: switch on the program that started the agent "
        "(your terminal, or Python for the service); then restart the agent",
    )


def quorum(decides: bool, here: int, voters: int, needed: tuple[str, ...]) -> CheckRow:
    if decides:
        return CheckRow("quorum", "ok", f"{here} of {voters} voters are here")
    who = f"one of {', '.join(needed)}" if len(needed) > 1 else ", ".join(needed) or "another voter"
    without = " ".join(f"--without {name}" for name in needed)
    return CheckRow(
        "quorum",
        "fail",
        f"only {here} of {voters} voters are here, so that nothing can be decided: {who} is missing",
        f"Start it (on it: barnraise up --detach); only if it is gone for good: barnraise continue {without}",
        needed[0] if len(needed) == 1 else "",
    )


def stalls(seconds: tuple[float, ...], up_s: float) -> CheckRow:
    """Pauses of this machine's own clock: sleep, a stopped process, a host that takes the processor away."""
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
    """The command that lets the port in; ``machine`` empty: here."""
    commands = {
        "linux": f"sudo ufw allow {port}/tcp, or with firewalld: sudo firewall-cmd --permanent "
        f"--add-port={port}/tcp && sudo firewall-cmd --reload",
        "macos": "System Settings, Network, Firewall, Options: allow incoming connections for Python",
        "windows": f'as administrator: netsh advfirewall firewall add rule name="Barnraise" dir=in '
        f"action=allow protocol=TCP localport={port} profile=private",
    }
    return f"{f'On {machine}' if machine else 'Here'}: {commands.get(os) or f'let TCP port {port} in'}"


def clock_fix(os: str) -> str:
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
        return "Let UDP port 5353 in; until then: barnraise join CODE --at HOST, or [network] peers"
    if name == "broadcast":
        return "Let UDP port 52415 in, or give all machines another [network] discovery_port"
    return "Correct [network] peers in the settings: barnraise settings"


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
