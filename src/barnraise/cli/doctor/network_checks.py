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


def port(facts: PortFacts) -> CheckRow:
    if facts.ours:
        return CheckRow("port", "ok", f"TCP {facts.number} is open, and ours")
    if facts.free:
        return CheckRow("port", "ok", f"TCP {facts.number} is free")
    holder = f" by {facts.holder}" if facts.holder else " by another program"
    return CheckRow(
        "port",
        "fail",
        f"TCP port {facts.number} is taken{holder}, so the agent cannot start",
        "End that program, or set another port on this machine: BARNRAISE_NETWORK_PORT (network.port)",
    )


def agent(facts: AgentFacts, version: str) -> CheckRow:
    if facts.trouble:
        return CheckRow(
            "agent",
            "fail",
            f"this machine's agent cannot be asked: {facts.trouble}",
            "barnraise down, then barnraise up --detach; under another user, give each a state directory",
        )
    if not facts.pid:
        return CheckRow("agent", "warn", "no agent runs on this machine", "barnraise up --detach")
    if not facts.agent:
        return CheckRow(
            "agent",
            "warn",
            f"a listener without an agent runs (pid {facts.pid}): its workers use it, no cluster does",
            "When its workers have stopped: barnraise up --detach",
        )
    if facts.version != version:
        return CheckRow(
            "agent",
            "warn",
            f"the agent (pid {facts.pid}) is Barnraise {facts.version}, this command is {version}",
            "Restart it: barnraise down, then barnraise up --detach",
        )
    return CheckRow("agent", "ok", f"runs (pid {facts.pid}), same version")


def firewall(
    firewalls: Iterable[FirewallFacts], number: int, system: str, came_in: tuple[str, ...]
) -> list[CheckRow]:
    """Check the firewalls of this machine. ``came_in``: peers that dialled it just now."""
    rows = []
    for facts in firewalls:
        fix = _firewall_fix(facts.tool, number, system)
        if came_in:
            rows.append(CheckRow("firewall", "ok", f"{facts.tool} is active and allows {came_in[0]}"))
        elif facts.lets_in:
            rows.append(CheckRow("firewall", "ok", f"{facts.tool} is active and allows TCP {number}"))
        elif facts.lets_in is None:
            rows.append(
                CheckRow(
                    "firewall",
                    "warn",
                    f"{facts.tool} is active; whether it allows TCP {number} cannot be seen from here"
                    + (f" ({facts.words})" if facts.words else ""),
                    f"If other machines cannot reach this one: {fix}",
                )
            )
        else:
            rows.append(
                CheckRow(
                    "firewall",
                    "fail",
                    f"{facts.tool} on this machine blocks TCP port {number}: others cannot connect to it"
                    + (f" ({facts.words})" if facts.words else ""),
                    fix,
                )
            )
    return rows or [CheckRow("firewall", "ok", "none is active here, as far as can be seen")]


def _firewall_fix(tool: str, number: int, system: str) -> str:
    commands = {
        "ufw": f"sudo ufw allow {number}/tcp",
        "firewalld": f"sudo firewall-cmd --permanent --add-port={number}/tcp && sudo firewall-cmd --reload",
        "nftables": f"add `tcp dport {number} accept` to the chain that drops (sudo nft list ruleset)",
    }
    return commands.get(tool) or firewall_fix(system, number, "")


def wsl(facts: WslFacts, number: int) -> CheckRow | None:
    if not facts.version:
        return None
    if facts.version == 1:
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
    if facts.mode == "mirrored":
        return CheckRow("wsl", "ok", "WSL2 with mirrored networking")
    if facts.mode in ("nat", ""):
        sure = "uses" if facts.mode else "probably uses"
        return CheckRow(
            "wsl",
            "fail" if facts.mode else "warn",
            f"this is WSL2 and {sure} its own network behind Windows: other machines cannot dial it and mDNS "
            "does not pass",
            "In %UserProfile%\\.wslconfig under [wsl2] write networkingMode=mirrored (Windows 11 22H2 or "
            f"newer); in PowerShell: wsl --shutdown; {rule}",
        )
    return CheckRow(
        "wsl",
        "warn",
        f"this is WSL2 with the network mode {facts.mode!r}, which was not tested",
        "In %UserProfile%\\.wslconfig under [wsl2] write networkingMode=mirrored, then: wsl --shutdown",
    )


def local_network(system: str, agent_runs: bool) -> CheckRow | None:
    """Check the local-network permission of macOS. Only a running agent can test it."""
    if system != "macos" or agent_runs:
        return None
    return CheckRow(
        "local-network",
        "ok",
        "only a running agent can tell whether macOS allows it to use the local network",
        "System Settings, Privacy & Security, Local Network: the program that starts the agent must be on",
    )


def bridge(bridges: Iterable[BridgeFacts]) -> CheckRow | None:
    """Check for network loops: two machines with two cables are fine, three bridges in a ring flood each
    other.
    """
    for facts in bridges:
        if len(facts.members) > 1 and not facts.stp:
            return CheckRow(
                "bridge",
                "warn",
                f"{facts.name} joins the Thunderbolt ports {', '.join(facts.members)} without loop "
                "protection: if the cables form a ring of three or more machines, all their networks break "
                "down",
                "Take one cable out of the ring, or take the ports out of the bridge (macOS: networksetup "
                "-setnetworkserviceenabled 'Thunderbolt Bridge' off; Linux: ip link set dev "
                f"{facts.name} type bridge stp_state 1)",
            )
    members = [name for facts in bridges for name in facts.members]
    return CheckRow("bridge", "ok", f"no loop is possible through {', '.join(members)}") if members else None


def hub(facts: HubFacts, system: str) -> list[CheckRow]:
    """Check that a hub answers with its key where its members look, and that they can reach them."""
    rows = [_hub_reached(facts)]
    ahead = next((way.ahead_s for way in facts.ways if way.ahead_s is not None), 0.0)
    if abs(ahead) >= _CLOCK_S:
        where = "ahead of" if ahead > 0 else "behind"
        sentence = f"the clock of {_its(facts)} is {format_duration(abs(ahead))} {where} this machine's"
        rows.append(_hub_row(facts, "warn", sentence, f"On the one that is wrong: {clock_fix(system)}"))
    if facts.kept and _is_up(facts) and not facts.region:
        sentence, fix = hub_reach([way.address for way in facts.ways])
        rows += [_hub_row(facts, "warn", f"{sentence} ({_its(facts)})", fix)] if sentence else []
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


def _hub_reached(facts: HubFacts) -> CheckRow:
    its, others = _its(facts), [way for way in facts.ways if way.other]
    answering = [way.address for way in facts.ways if way.answers]
    if facts.kept and not _is_up(facts):  # then another one may have its port
        sentence = f"{its} is on this machine but not running; start it: barnraise hub up --name {facts.name}"
        return _hub_row(facts, "ok", sentence)
    if answering and not others:
        return _hub_row(facts, "ok", f"{its} answers at {answering[0]} with the right key")
    words = "; ".join(way.words for way in others or facts.ways)[:400]
    if others:
        there = ", ".join(way.address for way in others)
        sentence = f"the server that answers at {there} is not {its}, or a proxy changes its answers: {words}"
        fix = _OWN_WAY if facts.kept else _NEW_INVITE
        return _hub_row(facts, "warn" if answering else "fail", sentence, fix)
    if not facts.kept:
        return _hub_row(facts, "warn", f"{its} does not answer: {words}", _WAIT)
    sentence = f"{its} is up here, but does not answer where friends look for it: {words}"
    is_outside = not hub_reach([way.address for way in facts.ways])[0]
    return _hub_row(facts, "warn" if is_outside else "fail", sentence, _OUTSIDE if is_outside else _MOVED)


def _its(facts: HubFacts) -> str:
    return f"the hub of {facts.name}"


def _is_up(facts: HubFacts) -> bool:
    return facts.up or any(way.answers for way in facts.ways)


def _hub_row(facts: HubFacts, state: State, sentence: str, fix: str = "") -> CheckRow:
    return CheckRow("hub", state, sentence, fix, facts.name)


_SAY_WAY = (
    "If friends are elsewhere: forward its TCP port at your router, use a tunnel (cloudflared, Tailscale "
    "Funnel), or keep the hub on a server; then: barnraise hub up --address https://... (docs/friends.md)"
)
_SAY_PROXY = (
    "Give the address of the proxy or tunnel in front of it: barnraise hub up --plain --address "
    "https://... (docs/friends.md); without one, leave out --plain"
)
_OWN_WAY = (
    "Look at what listens there: a proxy must pass everything on to the hub unchanged (docs/hub.md). If the "
    "hub was created again, make new invites: barnraise invite"
)
_NEW_INVITE = "Ask the hub's owner what happened there, and for a new invite if its key or address changed"
_WAIT = (
    "Wait: what was trained is kept and sent when it answers. If it lasts, ask its owner, and look whether "
    "this machine reaches the internet"
)
_OUTSIDE = (
    "Ask a friend: some routers block such connections from their own network. If it does not answer there "
    "either, look at the forwarded port, the tunnel or the proxy (docs/friends.md)"
)
_MOVED = (
    "If this machine's address has changed, give the new one: barnraise hub up --address https://...; then "
    "make new invites: barnraise invite"
)
