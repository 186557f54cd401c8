"""Makes facts of what the system's own commands and files say. Pure: any text gives some answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from barnraise.cli.doctor.facts import BridgeFacts

REMOTE = frozenset(
    {"9p", "afpfs", "afs", "ceph", "cifs", "davfs", "drvfs", "fuse.sshfs", "glusterfs", "lustre", "nfs"}
    | {"nfs4", "smb", "smb2", "smb3", "smbfs", "vboxsf", "webdav"}
)
_SUSPENDS = frozenset({"suspend", "hibernate", "hybrid-sleep", "suspend-then-hibernate", "sleep"})
_UNITS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hr": 3600, "d": 86400}


def torch_built_for(version_file: str) -> tuple[str, str]:
    """Return the CUDA and HIP versions in torch/version.py; empty if torch was built without them."""

    def value(name: str) -> str:
        match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", version_file, re.MULTILINE)
        return match[1] if match is not None else ""

    return value("cuda"), value("hip")


def nvidia_cards(listed: str) -> tuple[str, ...]:
    """Return the GPUs that `nvidia-smi -L` lists."""
    return tuple(re.findall(r"^GPU \d+: (.+?)(?: \(UUID.*\))?$", listed, re.MULTILINE))


def filesystem_of(path: str, mounts: Iterable[tuple[str, str]]) -> str:
    """Return the file system type of the longest mount point above a path."""
    best, filesystem = -1, ""
    for mount, kind in mounts:
        inside = path == mount or path.startswith(mount.rstrip("/\\") + "/") or mount in ("/", "\\")
        if (inside or path.lower().startswith(mount.lower().rstrip("\\") + "\\")) and len(mount) > best:
            best, filesystem = len(mount), kind
    return filesystem


# firewalls


def ufw_is_on(configuration: str) -> bool:
    """Read /etc/ufw/ufw.conf, which every user may read: return True if ufw is on."""
    return re.search(r"^\s*ENABLED\s*=\s*yes\s*$", configuration, re.MULTILINE | re.IGNORECASE) is not None


def ufw_lets_in(status: str, port: int) -> bool:
    """Read `ufw status`, which only root may run: return True if the port is open."""
    for line in status.splitlines():
        match = re.match(r"^(\S+)(?: \(v6\))?\s+(?:ALLOW|LIMIT)\b", line)
        if match is not None and (match[1] == "Anywhere" or _has_port(match[1], port)):
            return True
    return False


def firewalld_lets_in(ports: str, port: int) -> bool:
    """Read `firewall-cmd --list-ports`, with words like 1025-65535/tcp: return True if the port is open."""
    return any(_has_port(word, port) for word in ports.split())


def _has_port(word: str, port: int) -> bool:
    numbers, _, protocol = word.partition("/")
    if protocol not in ("", "tcp"):
        return False
    for part in numbers.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:[-:]([0-9]{1,5}))?", part)
        if match is not None and int(match[1]) <= port <= int(match[2] or match[1]):
            return True
    return False


def nft_lets_in(ruleset: str, port: int) -> bool | None:
    """Read `nft -j list ruleset`: return None if the rules are too complex for this parser."""
    try:
        objects = json.loads(ruleset)["nftables"]
        chains = [entry["chain"] for entry in objects if "chain" in entry]
        rules = [entry["rule"] for entry in objects if "rule" in entry]
        inputs = [chain for chain in chains if chain.get("hook") == "input"]
        answers = [_chain_lets_in(chain, rules, port) for chain in inputs]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if False in answers:
        return False
    return None if None in answers else True


def _chain_lets_in(chain: Mapping[str, Any], rules: list[Any], port: int) -> bool | None:
    """Read rules in order until one decides about a new connection to the port. Return None if unclear."""
    unclear = False
    for rule in rules:
        if (rule["family"], rule["table"], rule["chain"]) != (chain["family"], chain["table"], chain["name"]):
            continue
        matches, verdict = _rule(rule["expr"], port)
        if verdict is None or matches is False:
            continue
        if matches is None or verdict == "elsewhere":
            unclear = True
            continue
        return None if unclear and verdict == "drop" else verdict == "accept"
    if chain.get("policy") != "drop":
        return True
    return None if unclear else False


def _rule(expressions: Iterable[Mapping[str, Any]], port: int) -> tuple[bool | None, str | None]:
    """Return whether a rule matches a new TCP connection to the port (None: unknown), and its action."""
    matches: bool | None = True
    verdict: str | None = None
    for expression in expressions:
        kind = next(iter(expression), "")
        if kind == "match":
            result = _matches(expression["match"], port)
            matches = result if matches is True or result is False else matches
        elif kind in ("accept", "drop", "reject"):
            verdict = "accept" if kind == "accept" else "drop"
        elif kind in ("jump", "goto", "vmap", "xt"):
            verdict = verdict or "elsewhere"
    return matches, verdict


def _matches(match: Mapping[str, Any], port: int) -> bool | None:
    left, right = match.get("left"), match.get("right")
    if match.get("op") not in ("==", "in") or not isinstance(left, Mapping):
        return None
    payload = left.get("payload", {})
    if payload.get("field") == "dport":
        if payload.get("protocol") not in ("tcp", "th"):
            return False
        return _holds(right, port)
    if "ct" in left and left["ct"].get("key") == "state":
        return "new" in (right if isinstance(right, list) else [right])
    if "meta" in left and left["meta"].get("key") in ("iif", "iifname"):
        return False if right == "lo" else None
    is_protocol = "meta" in left and left["meta"].get("key") == "l4proto"
    if is_protocol or payload.get("field") in ("protocol", "nexthdr"):
        return "tcp" in str(right)
    return None


def _holds(right: object, port: int) -> bool | None:
    if isinstance(right, Mapping):
        if "range" in right:
            first, last = right["range"]
            return bool(first <= port <= last)
        if "set" in right:
            answers = [_holds(element, port) for element in right["set"]]
            return True if True in answers else None if None in answers else False
        return None
    return right == port if isinstance(right, int) else None


def macos_firewall(state: str, block_all: str, app: str) -> tuple[bool, bool | None]:
    """Read three answers of socketfilterfw: return whether it is on, and whether it accepts this program."""
    on = re.search(r"State = [12]", state) is not None
    blocks = block_all.lower()
    if "block all non-essential" in blocks or ("enabled" in blocks and "disabled" not in blocks):
        return on, False
    if "blocked" in app.lower():
        return on, False
    return on, True if "permitted" in app.lower() else None


def windows_firewall_is_on(answers: Iterable[str]) -> bool:
    """Read what `reg query` prints for EnableFirewall in each profile: return True if one is on."""
    return any(re.search(r"EnableFirewall\s+REG_DWORD\s+0x1\b", answer) for answer in answers)


# sleep


def logind_idle_s(files: Iterable[str]) -> int:
    """Read logind.conf and its overrides in order: return the idle time before sleep, 0 for never."""
    action, seconds = "ignore", 30 * 60
    for text in files:
        for key, value in re.findall(r"^\s*(\w+)\s*=\s*(\S+)\s*$", text, re.MULTILINE):
            if key == "IdleAction":
                action = value.lower()
            elif key == "IdleActionSec":
                seconds = _seconds(value)
    return seconds if action in _SUSPENDS else 0


def _seconds(text: str) -> int:
    total = sum(
        int(number) * _UNITS.get(unit, 60)
        for number, unit in re.findall(r"([0-9]{1,9})([a-z]*)", text.lower())
    )
    return total or 30 * 60


def gnome_idle_s(kind: str, timeout: str) -> int | None:
    """Read two answers of `gsettings get`: return the idle time before sleep."""
    if not kind.strip():
        return None
    if kind.strip().strip("'") not in _SUSPENDS:
        return 0
    digits = re.search(r"[0-9]{1,9}$", timeout.strip())
    return int(digits[0]) if digits is not None else None


def pmset_idle_s(printed: str) -> int | None:
    """Read `pmset -g custom`: return the idle time on mains power, or the only one listed."""
    sections = re.split(r"^(\S.*):\s*$", printed, flags=re.MULTILINE)
    named = dict(zip(sections[1::2], sections[2::2], strict=False))
    match = re.search(r"^\s*sleep\s+([0-9]{1,6})\b", named.get("AC Power", printed), re.MULTILINE)
    return int(match[1]) * 60 if match is not None else None


def powercfg_idle_s(printed: str) -> int | None:
    """Read `powercfg /query`: in every language the last two numbers are seconds on mains and on battery."""
    numbers = re.findall(r"0x([0-9a-fA-F]{8})\s*$", printed, re.MULTILINE)
    return int(numbers[-2], 16) if len(numbers) >= 2 else None


# bridges


def macos_bridges(ifconfig: str, ports: Mapping[str, str]) -> tuple[BridgeFacts, ...]:
    """Read `ifconfig -a`: return bridges with the Thunderbolt ports that have a cable."""
    blocks = dict(_blocks(ifconfig))
    bridges = []
    for name, block in blocks.items():
        if not name.startswith("bridge"):
            continue
        members = re.findall(r"^\s+member: (\S+) flags=\w+<([^>]*)>", block, re.MULTILINE)
        up = [
            (member, flags)
            for member, flags in members
            if "status: active" in blocks.get(member, "")
            and ports.get(member, "Thunderbolt").startswith("Thunderbolt")
        ]
        stp = bool(up) and all("STP" in flags.split(",") for _, flags in up)
        bridges.append(BridgeFacts(name, tuple(member for member, _ in up), stp))
    return tuple(bridges)


def _blocks(ifconfig: str) -> Iterator[tuple[str, str]]:
    parts = re.split(r"^(\S+?): flags=", ifconfig, flags=re.MULTILINE)
    yield from zip(parts[1::2], parts[2::2], strict=False)
