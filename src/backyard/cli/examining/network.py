"""Judges how this machine stands in the network: port, agent, firewall, WSL, macOS, bridges. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from backyard.agent.symptoms import firewall_mend
from backyard.cli.examining.facts import Bridge, Firewall, Port, Running, Wsl
from backyard.core.errors import BackyardError
from backyard.local.questions import CheckRow

_WSL_CREATOR = "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"


def settings(error: BackyardError | None) -> CheckRow:
    if error is None:
        return CheckRow("settings", "ok", "valid")
    return CheckRow("settings", "fail", error.message, error.hint)


def port(found: Port) -> CheckRow:
    if found.ours:
        return CheckRow("port", "ok", f"TCP {found.number} is open, and ours")
    if found.free:
        return CheckRow("port", "ok", f"TCP {found.number} is free")
    holder = f" by {found.holder}" if found.holder else " by another program"
    return CheckRow(
        "port",
        "fail",
        f"TCP port {found.number} is taken{holder}, so that the agent cannot start",
        "End that program, or set another port on this machine: BACKYARD_NETWORK_PORT (network.port)",
    )


def agent(found: Running, version: str) -> CheckRow:
    if found.trouble:
        return CheckRow(
            "agent",
            "fail",
            f"this machine's agent cannot be asked: {found.trouble}",
            "backyard down, then backyard up --detach; under another user, give each a state directory",
        )
    if not found.pid:
        return CheckRow("agent", "warn", "no agent runs on this machine", "backyard up --detach")
    if not found.agent:
        return CheckRow(
            "agent",
            "warn",
            f"a listener without an agent runs (pid {found.pid}): its workers use it, no cluster does",
            "When its workers have ended: backyard up --detach",
        )
    if found.version != version:
        return CheckRow(
            "agent",
            "warn",
            f"the agent (pid {found.pid}) is Backyard {found.version}, this command is {version}",
            "Restart it: backyard down, then backyard up --detach",
        )
    return CheckRow("agent", "ok", f"runs (pid {found.pid}), same version")


def firewall(found: Iterable[Firewall], number: int, system: str, came_in: tuple[str, ...]) -> list[CheckRow]:
    """``came_in``: peers that dialled this machine just now; what they did cannot be blocked."""
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
    return commands.get(tool) or firewall_mend(system, number, "")


def wsl(found: Wsl, number: int) -> CheckRow | None:
    if not found.version:
        return None
    if found.version == 1:
        return CheckRow(
            "wsl",
            "warn",
            "this is WSL1: it has no GPU and no systemd",
            "In PowerShell: wsl --set-version DISTRIBUTION 2; or install Backyard in Windows itself",
        )
    rule = (
        "then, as administrator: New-NetFirewallHyperVRule -Name Backyard -DisplayName Backyard -Direction "
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
    """No program may ask macOS whether it is allowed; a running agent tries it."""
    if system != "macos" or agent_runs:
        return None
    return CheckRow(
        "local-network",
        "ok",
        "only a running agent can tell whether macOS lets it use the local network",
        "System Settings, Privacy & Security, Local Network: the program that starts the agent must be on",
    )


def bridge(found: Iterable[Bridge]) -> CheckRow | None:
    """Two machines with two cables are fine; three in a ring of bridges flood each other."""
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
