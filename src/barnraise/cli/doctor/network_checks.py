"""Judges how this machine stands in the network: port, agent, firewall, WSL, macOS, bridges, hubs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal
from urllib.parse import urlsplit

from barnraise.agent.diagnostics.checks import clock_fix, firewall_fix
from barnraise.agent_client.cluster_requests import CheckRow
from barnraise.cli.doctor.facts import AgentFacts, BridgeFacts, FirewallFacts, HubFacts, PortFacts, WslFacts
from barnraise.core.errors import BarnraiseError
from barnraise.core.units import format_duration
from barnraise.transport.addresses import reach_of

State = Literal["ok", "warn", "fail"]
_CLOCK_S = 120.0  # as hubs allow
_WSL_CREATOR = "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"


def settings(error: BarnraiseError | None) -> CheckRow:
    if error is None:
        return CheckRow("settings", "ok", "valid")
    return CheckRow("settings", "fail", error.message, error.hint)


def port(found: PortFacts) -> CheckRow:
    if found.ours:
        return CheckRow("port", "ok", f"TCP {found.number} is open, and ours")
    if found.free:
        return CheckRow("port", "ok", f"TCP {found.number} is free")
    holder = f" by {found.holder}" if found.holder else " by another program"
    return CheckRow(
        "port",
        "fail",
        f"TCP port {found.number} is taken{holder}, so that the agent cannot start",
        "End that program, or set another port on this machine: BARNRAISE_NETWORK_PORT (network.port)",
    )


def agent(found: AgentFacts, version: str) -> CheckRow:
    if found.trouble:
        return CheckRow(
            "agent",
            "fail",
            f"this machine's agent cannot be asked: {found.trouble}",
            "barnraise down, then barnraise up --detach; under another user, give each a state directory",
        )
    if not found.pid:
        return CheckRow("agent", "warn", "no agent runs on this machine", "barnraise up --detach")
    if not found.agent:
        return CheckRow(
            "agent",
            "warn",
            f"a listener without an agent runs (pid {found.pid}): its workers use it, no cluster does",
            "When its workers have ended: barnraise up --detach",
        )
    if found.version != version:
        return CheckRow(
            "agent",
            "warn",
            f"the agent (pid {found.pid}) is Barnraise {found.version}, this command is {version}",
            "Restart it: barnraise down, then barnraise up --detach",
        )
    return CheckRow("agent", "ok", f"runs (pid {found.pid}), same version")


def firewall(
    found: Iterable[FirewallFacts], number: int, system: str, came_in: tuple[str, ...]
) -> list[CheckRow]:
    """Check the firewalls of this machine. ``came_in``: peers that dialled it just now."""
    rows = []
    for one in found:
        mend = _firewall_mend(one.tool, number, system)
        if came_in:
            rows.append(CheckRow("firewall", "ok", f"{one.tool} is active and lets {came_in[0]} in"))
        elif one.lets_in:
            rows.append(CheckRow("firewall", "ok", f"{one.tool} is active and lets TCP {number} in"))
        elif one.lets_in is None:
            rows.append(
                CheckRow(
                    "firewall",
                    "warn",
                    f"{one.tool} is active, and whether it lets TCP {number} in cannot be seen from here"
                    + (f" ({one.words})" if one.words else ""),
                    f"If other machines cannot reach this one: {mend}",
                )
            )
        else:
            rows.append(
                CheckRow(
                    "firewall",
                    "fail",
                    f"{one.tool} on this machine does not let TCP port {number} in: others cannot dial it"
                    + (f" ({one.words})" if one.words else ""),
                    mend,
                )
            )
    return rows or [CheckRow("firewall", "ok", "none is active here, as far as can be seen")]


def _firewall_mend(tool: str, number: int, system: str) -> str:
    commands = {
        "ufw": f"sudo ufw allow {number}/tcp",
        "firewalld": f"sudo firewall-cmd --permanent --add-port={number}/tcp && sudo firewall-cmd --reload",
        "nftables": f"add `tcp dport {number} accept` to the chain that drops (sudo nft list ruleset)",
    }
    return commands.get(tool) or firewall_fix(system, number, "")


def wsl(found: WslFacts, number: int) -> CheckRow | None:
    if not found.version:
        return None
    if found.version == 1:
        return CheckRow(
            "wsl",
            "warn",
            "this is WSL1: it has no GPU and no systemd",
            "In PowerShell: wsl --set-version DISTRIBUTION 2; or install Barnraise in Windows itself",
        )
    rule = (
        "then, as administrator: New-NetFirewallHyperVRule -Name Barnraise -DisplayName Barnraise -Direction "
        f"Inbound -VMCreatorId '{_WSL_CREATOR}' -Protocol TCP -LocalPorts {number} -Action Allow"
    )
    if found.mode == "mirrored":
        return CheckRow("wsl", "ok", "WSL2 with mirrored networking")
    if found.mode in ("nat", ""):
        sure = "uses" if found.mode else "probably uses"
        return CheckRow(
            "wsl",
            "fail" if found.mode else "warn",
            f"this is WSL2 and {sure} its own network behind Windows: other machines cannot dial it and mDNS "
            "does not pass",
            "In %UserProfile%\\.wslconfig under [wsl2] write networkingMode=mirrored (Windows 11 22H2 or "
            f"newer); in PowerShell: wsl --shutdown; {rule}",
        )
    return CheckRow(
        "wsl",
        "warn",
        f"this is WSL2 with the network mode {found.mode!r}, which was not tested",
        "In %UserProfile%\\.wslconfig under [wsl2] write networkingMode=mirrored, then: wsl --shutdown",
    )


def local_network(system: str, agent_runs: bool) -> CheckRow | None:
    """Check the local-network permission of macOS. Only a running agent can test it."""
    if system != "macos" or agent_runs:
        return None
    return CheckRow(
        "local-network",
        "ok",
        "only a running agent can tell whether macOS lets it use the local network",
        "System Settings, Privacy & Security, Local Network: the program that starts the agent must be on",
    )


def bridge(found: Iterable[BridgeFacts]) -> CheckRow | None:
    """Check for network loops: two machines with two cables are fine, three bridges in a ring flood each
    other.
    """
    for one in found:
        if len(one.members) > 1 and not one.stp:
            return CheckRow(
                "bridge",
                "warn",
                f"{one.name} joins the Thunderbolt ports {', '.join(one.members)} without loop protection: "
                "if the cables form a ring of three or more machines, all their networks break down",
                "Take one cable out of the ring, or take the ports out of the bridge (macOS: networksetup "
                "-setnetworkserviceenabled 'Thunderbolt Bridge' off; Linux: ip link set dev "
                f"{one.name} type bridge stp_state 1)",
            )
    members = [name for one in found for name in one.members]
    return CheckRow("bridge", "ok", f"no loop is possible through {', '.join(members)}") if members else None


def hub(found: HubFacts, system: str) -> list[CheckRow]:
    """Check that a hub answers with its key where its members look, and that they can reach them."""
    rows = [_hub_reached(found)]
    ahead = next((way.ahead_s for way in found.ways if way.ahead_s is not None), 0.0)
    if abs(ahead) >= _CLOCK_S:
        where = "ahead of" if ahead > 0 else "behind"
        said = f"the clock of {_its(found)} is {format_duration(abs(ahead))} {where} this machine's"
        rows.append(_hub_row(found, "warn", said, f"On the one that is wrong: {clock_fix(system)}"))
    if found.kept and _is_up(found) and not found.region:
        said, mend = hub_reach([way.address for way in found.ways])
        rows += [_hub_row(found, "warn", f"{said} ({_its(found)})", mend)] if said else []
    return rows


def hub_reach(addresses: Sequence[str]) -> tuple[str, str]:
    """Return the problem for members in other networks and its fix; both empty if there is none."""
    reaches = [reach_of(_host(address)) for address in addresses]
    if "internet" in reaches:
        return "", ""
    listed = ", ".join(addresses)
    if "network" not in reaches:
        return f"only this machine itself reaches {listed}", _SAY_PROXY
    return f"only machines of this network reach {listed}; friends elsewhere do not", _SAY_WAY


def _host(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # what was typed is no address at all
        return ""


def _hub_reached(found: HubFacts) -> CheckRow:
    its, others = _its(found), [way for way in found.ways if way.other]
    answering = [way.address for way in found.ways if way.answers]
    if found.kept and not _is_up(found):  # then another one may have its port
        said = f"{its} is kept here and not up; `barnraise hub up --name {found.name}` goes on with it"
        return _hub_row(found, "ok", said)
    if answering and not others:
        return _hub_row(found, "ok", f"{its} answers at {answering[0]} with the right key")
    words = "; ".join(way.words for way in others or found.ways)[:400]
    if others:
        there = ", ".join(way.address for way in others)
        said = f"whoever answers at {there} is not {its}, or changes what it says: {words}"
        mend = _OWN_WAY if found.kept else _NEW_INVITE
        return _hub_row(found, "warn" if answering else "fail", said, mend)
    if not found.kept:
        return _hub_row(found, "warn", f"{its} does not answer: {words}", _WAIT)
    said = f"{its} is up here, but does not answer where friends look for it: {words}"
    is_outside = not hub_reach([way.address for way in found.ways])[0]
    return _hub_row(found, "warn" if is_outside else "fail", said, _OUTSIDE if is_outside else _MOVED)


def _its(found: HubFacts) -> str:
    return f"the hub of {found.name}"


def _is_up(found: HubFacts) -> bool:
    return found.up or any(way.answers for way in found.ways)


def _hub_row(found: HubFacts, state: State, sentence: str, mend: str = "") -> CheckRow:
    return CheckRow("hub", state, sentence, mend, found.name)


_SAY_WAY = (
    "If friends are elsewhere: forward its TCP port at your router, use a tunnel (cloudflared, Tailscale "
    "Funnel), or keep the hub on a server; then: barnraise hub up --address https://... (docs/friends.md)"
)
_SAY_PROXY = (
    "Say the address of the proxy or tunnel that stands before it: barnraise hub up --plain --address "
    "https://... (docs/friends.md); without one, leave out --plain"
)
_OWN_WAY = (
    "Look at what listens there: a proxy must pass everything on to the hub unchanged (docs/hub.md). If the "
    "hub was founded anew, make new invites: barnraise invite"
)
_NEW_INVITE = "Ask the hub's owner what happened there, and for a new invite if its key or address changed"
_WAIT = (
    "Wait: what was trained is kept and sent when it answers. If it lasts, ask its owner, and look whether "
    "this machine reaches the internet"
)
_OUTSIDE = (
    "Ask a friend: some routers do not let their own network in that way. If it does not answer there "
    "either, look at the forwarded port, the tunnel or the proxy (docs/friends.md)"
)
_MOVED = (
    "If this machine's address has changed, say the new one: barnraise hub up --address https://...; then "
    "make new invites: barnraise invite"
)
