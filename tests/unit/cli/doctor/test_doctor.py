"""Every check both ways, with made-up facts; what is read of the system; and the command itself.

Nothing here asks the real system: commands and the agent are stand-ins, files are in a temporary root.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise import __version__
from barnraise.agent.diagnostics import checks
from barnraise.agent_client.cluster_requests import CheckRequest, CheckResponse, CheckRow
from barnraise.cli.doctor import CHECKS, collect, doctor, hub_checks, machine_checks, network_checks, parsers
from barnraise.cli.doctor.facts import (
    AgentFacts,
    BridgeFacts,
    DiskFacts,
    FirewallFacts,
    HubAddressFacts,
    HubFacts,
    KeyFacts,
    NvidiaFacts,
    PortFacts,
    RequirementsFacts,
    SleepFacts,
    TorchFacts,
    WslFacts,
)
from barnraise.cli.main import main
from barnraise.core.command import NOT_FOUND
from barnraise.core.errors import AgentError, ConfigError
from barnraise.core.flow.background import DeadlineCall
from barnraise.core.installation import TESTED_FIRST
from barnraise.transport.ipc.messages import ListenerStanding
from tests.repository import ROOT

PAGES = ROOT / "docs" / "doctor"
GOOD_TORCH = TorchFacts(f"{TESTED_FIRST[0]}.{TESTED_FIRST[1]}.0+cu130", cuda="13.0")
CPU_TORCH = TorchFacts(f"{TESTED_FIRST[0]}.{TESTED_FIRST[1]}.0+cpu")
NOW_S = 1.8e9

OUTSIDE, HOME = "https://hub.example.org", "https://192.168.1.20:52480"
SILENT, STRANGE = "it does not answer in time", "it answered 200, and the answer is not the hub's"


def one_hub(*ways: HubAddressFacts, **facts: bool) -> HubFacts:
    return HubFacts("friends", ways, **facts)


Case = tuple[Callable[[], CheckRow | None], str, str]
CASES: list[Case] = [
    (lambda: machine_checks.python((3, 12, 4), 64), "ok", "3.12.4"),
    (lambda: machine_checks.python((3, 10, 9), 64), "fail", "too old"),
    (lambda: machine_checks.python((3, 12, 4), 32), "fail", "32-bit"),
    (lambda: machine_checks.python((3, 15, 0), 64), "warn", "not tested"),
    (lambda: machine_checks.barnraise("0.1.0", "0.1.0"), "ok", "0.1.0"),
    (lambda: machine_checks.barnraise("0.1.0", None), "ok", "0.1.0"),
    (lambda: machine_checks.barnraise("0.2.0", "0.1.0"), "warn", "did not finish"),
    (lambda: machine_checks.requirements(RequirementsFacts("uv.lock")), "ok", "by hashes"),
    (lambda: machine_checks.requirements(RequirementsFacts("requirements.txt", 3)), "warn", "3 requirements"),
    (lambda: machine_checks.requirements(RequirementsFacts("", 0, "-e .")), "warn", "-e ."),
    (lambda: machine_checks.torch(GOOD_TORCH, "linux", "x86_64"), "ok", GOOD_TORCH.version),
    (lambda: machine_checks.torch(TorchFacts(), "linux", "x86_64"), "warn", "not installed"),
    (lambda: machine_checks.torch(TorchFacts(), "macos", "x86_64"), "warn", "Intel Macs"),
    (lambda: machine_checks.torch(TorchFacts("1.9.0"), "linux", "x86_64"), "warn", "not tested"),
    (lambda: machine_checks.gpu(NvidiaFacts(), CPU_TORCH), "ok", "no NVIDIA card"),
    (lambda: machine_checks.gpu(NvidiaFacts(("RTX 4090",), True), GOOD_TORCH), "ok", "RTX 4090"),
    (
        lambda: machine_checks.gpu(NvidiaFacts(("RTX 4090",), True), CPU_TORCH),
        "fail",
        "CPU only and cannot use RTX 4090",
    ),
    (lambda: machine_checks.gpu(NvidiaFacts(("RTX 4090",), True), TorchFacts()), "ok", "RTX 4090"),
    (lambda: machine_checks.gpu(NvidiaFacts(("a card",)), GOOD_TORCH), "warn", "no NVIDIA driver"),
    (lambda: machine_checks.gpu(NvidiaFacts(("a card",), True, "mismatch"), GOOD_TORCH), "fail", "mismatch"),
    (lambda: machine_checks.disk(DiskFacts("/s", 50 * 2**30)), "ok", "50.0 GB"),
    (lambda: machine_checks.disk(DiskFacts("/s", 2**30)), "warn", "only 1.0 GB"),
    (lambda: machine_checks.disk(DiskFacts("/s", 2**20)), "fail", "cannot keep its decisions"),
    (lambda: machine_checks.disk(DiskFacts("/s")), "warn", "cannot be seen"),
    (lambda: machine_checks.network_disk(DiskFacts("/s", 1, "ext4")), "ok", "local"),
    (lambda: machine_checks.network_disk(DiskFacts("/s", 1, "nfs4", True)), "fail", "network disk (nfs4)"),
    (lambda: machine_checks.key(KeyFacts("/s/node.key", mode=0o100600)), "ok", "this user alone"),
    (lambda: machine_checks.key(KeyFacts("/s/node.key", exists=False)), "ok", "no node key yet"),
    (lambda: machine_checks.key(KeyFacts("/s/node.key", mode=0o100644)), "fail", "mode 0644"),
    (
        lambda: machine_checks.key(KeyFacts("/s/node.key", mode=0o100600, is_own=False)),
        "fail",
        "another user",
    ),
    (
        lambda: machine_checks.cloned_key(KeyFacts("/s/node.key", made_s=NOW_S, machine_made_s=1e9)),
        "ok",
        "no sign",
    ),
    (
        lambda: machine_checks.cloned_key(KeyFacts("/s/node.key", made_s=1e9, machine_made_s=NOW_S)),
        "warn",
        "older than",
    ),
    (lambda: machine_checks.cloned_key(KeyFacts("/s/node.key", in_image=True)), "warn", "every container"),
    (lambda: machine_checks.clock(NOW_S, NOW_S - 5, "linux"), "ok", "2027-01-15"),
    (lambda: machine_checks.clock(1000.0, NOW_S, "linux"), "warn", "1970-01-01"),
    (lambda: machine_checks.clock(9e9, NOW_S, "windows"), "warn", "which is wrong"),
    (lambda: machine_checks.sleep(SleepFacts(0, "logind"), "linux"), "ok", "does not sleep"),
    (lambda: machine_checks.sleep(SleepFacts(0, "logind", lid=True), "linux"), "ok", "closing the lid"),
    (lambda: machine_checks.sleep(SleepFacts(), "linux"), "ok", "could be read"),
    (lambda: machine_checks.sleep(SleepFacts(900, "GNOME"), "linux"), "warn", "after 15 min"),
    (lambda: network_checks.settings(None), "ok", "valid"),
    (lambda: network_checks.settings(ConfigError("port is wrong")), "fail", "port is wrong"),
    (lambda: network_checks.port(PortFacts(52416)), "ok", "free"),
    (lambda: network_checks.port(PortFacts(52416, ours=True)), "ok", "ours"),
    (
        lambda: network_checks.port(PortFacts(52416, free=False, holder="nginx (pid 7)")),
        "fail",
        "nginx (pid 7)",
    ),
    (lambda: network_checks.agent(AgentFacts("1", 7, True), "1"), "ok", "pid 7"),
    (lambda: network_checks.agent(AgentFacts("1", 7, True), "2"), "warn", "Barnraise 1, this command is 2"),
    (lambda: network_checks.agent(AgentFacts("1", 7, False), "1"), "warn", "listener without an agent"),
    (lambda: network_checks.agent(AgentFacts(), "1"), "warn", "no agent runs"),
    (lambda: network_checks.agent(AgentFacts(trouble="another user"), "1"), "fail", "another user"),
    (lambda: network_checks.wsl(WslFacts(2, "mirrored"), 52416), "ok", "mirrored"),
    (lambda: network_checks.wsl(WslFacts(2, "nat"), 52416), "fail", "cannot dial it"),
    (lambda: network_checks.wsl(WslFacts(2, ""), 52416), "warn", "probably"),
    (lambda: network_checks.wsl(WslFacts(2, "virtioproxy"), 52416), "warn", "virtioproxy"),
    (lambda: network_checks.wsl(WslFacts(1), 52416), "warn", "WSL1"),
    (lambda: network_checks.local_network("macos", False), "ok", "only a running agent"),
    (
        lambda: network_checks.hub(one_hub(HubAddressFacts(OUTSIDE, answers=True)), "linux")[0],
        "ok",
        f"at {OUTSIDE} with",
    ),
    (lambda: network_checks.hub(one_hub(HubAddressFacts(OUTSIDE, words=SILENT)), "linux")[0], "warn", SILENT),
    (
        lambda: network_checks.hub(one_hub(HubAddressFacts(OUTSIDE, words=STRANGE, other=True)), "linux")[0],
        "fail",
        STRANGE,
    ),
    (
        lambda: network_checks.hub(
            one_hub(HubAddressFacts(HOME, words=STRANGE, other=True), HubAddressFacts(OUTSIDE, answers=True)),
            "linux",
        )[0],
        "warn",
        f"answers at {HOME} is not the hub of friends",
    ),
    (
        lambda: network_checks.hub(one_hub(HubAddressFacts(HOME, words=SILENT), kept=True), "linux")[0],
        "ok",
        "not running",
    ),
    (
        lambda: network_checks.hub(one_hub(HubAddressFacts(HOME, other=True), kept=True), "linux")[0],
        "ok",
        "not running",
    ),
    (
        lambda: network_checks.hub(one_hub(HubAddressFacts(HOME, words=SILENT), kept=True, up=True), "linux")[
            0
        ],
        "fail",
        "does not answer where friends look",
    ),
    (
        lambda: network_checks.hub(
            one_hub(HubAddressFacts(OUTSIDE, words=SILENT), kept=True, up=True), "linux"
        )[0],
        "warn",
        "does not answer where friends look",
    ),
    (lambda: network_checks.bridge([BridgeFacts("br0", ("thunderbolt0",))]), "ok", "no loop"),
    (lambda: network_checks.bridge([BridgeFacts("br0", ("a", "b"), stp=True)]), "ok", "no loop"),
    (lambda: network_checks.bridge([BridgeFacts("bridge0", ("en2", "en3"))]), "warn", "ring of three"),
]


@pytest.mark.parametrize(("check", "state", "words"), CASES)
def test_each_check_both_ways(check: Callable[[], CheckRow | None], state: str, words: str) -> None:
    row = check()
    assert row is not None
    assert row.state == state
    assert words in row.sentence
    assert bool(row.fix) == (state != "ok") or row.name == "local-network", "every problem has a fix"
    assert row.name in CHECKS


def test_every_check_was_seen_fine_and_not_fine() -> None:
    seen: dict[str, set[bool]] = {name: set() for name in CHECKS}
    for check, state, _ in CASES:
        row = check()
        assert row is not None
        seen[row.name].add(state == "ok")
    del seen["firewall"]  # has its own test
    del seen["local-network"]  # from outside the agent it cannot be seen
    assert [name for name, states in seen.items() if len(states) < 2] == []


def test_checks_without_subject_are_hidden() -> None:
    assert network_checks.wsl(WslFacts(), 52416) is None
    assert network_checks.bridge([]) is None
    assert network_checks.bridge([BridgeFacts("br0")]) is None
    assert network_checks.local_network("linux", False) is None
    assert network_checks.local_network("macos", True) is None
    assert machine_checks.cloned_key(KeyFacts("/s/node.key", exists=False)) is None


def test_hub_with_private_address_is_a_warning() -> None:
    def judge(*addresses: str, **facts: bool) -> list[CheckRow]:
        ways = (HubAddressFacts(address, answers=True) for address in addresses)
        return network_checks.hub(one_hub(*ways, **{"kept": True, **facts}), "linux")[1:]

    (home,) = judge(HOME, "https://[fd00::2]:52480", "https://nas.local:52480")
    assert (home.state, home.name, home.peer) == ("warn", "hub", "friends")
    assert f"only machines of this network reach {HOME}, https://[fd00::2]:52480" in home.sentence
    for word in ("forward", "tunnel", "server", "--address https://", "docs/friends.md"):
        assert word in home.fix
    for address in ("http://127.0.0.1:52480", "https://localhost:52480", "https://[::1]:52480"):
        (alone,) = judge(address)
        assert alone.sentence == f"only this machine itself reaches {address} (the hub of friends)"
        assert "barnraise hub up --plain --address" in alone.fix
    assert judge(HOME, OUTSIDE) == []
    assert judge("https://8.8.8.8:52480") == judge("https://[2606:4700::1]") == []
    assert judge("https://100.64.0.7")[0].state == "warn", "an address that a provider shares among homes"
    assert judge("https://[")[0].state == "warn"
    assert judge(HOME, region=True) == judge(HOME, kept=False) == []


def test_clock_skew_of_hub_is_reported() -> None:
    for ahead, words in ((7200.0, "2 h ahead of"), (-300.0, "5 min behind")):
        reached, clock = network_checks.hub(
            one_hub(HubAddressFacts(OUTSIDE, answers=True, ahead_s=ahead)), "linux"
        )
        assert reached.state == "ok"
        assert (clock.state, clock.name) == ("warn", "hub")
        assert f"the clock of the hub of friends is {words} this machine's" in clock.sentence
        assert "timedatectl" in clock.fix
    assert (
        len(network_checks.hub(one_hub(HubAddressFacts(OUTSIDE, answers=True, ahead_s=-119.0)), "linux")) == 1
    )


@pytest.mark.parametrize("system", ["linux", "macos", "windows"])
def test_firewall_is_judged_by_its_effect(system: str) -> None:
    def judge(*facts: FirewallFacts, came_in: tuple[str, ...] = ()) -> list[CheckRow]:
        return network_checks.firewall(facts, 6000, system, came_in)

    assert [row.state for row in judge()] == ["ok"]
    assert [row.state for row in judge(FirewallFacts("ufw", True))] == ["ok"]
    (unknown,) = judge(FirewallFacts("ufw", None, "its rules are shown to root only"))
    assert unknown.state == "warn"
    assert "root only" in unknown.sentence
    (blocked,) = judge(FirewallFacts("ufw", False))
    assert blocked.state == "fail"
    assert "6000" in blocked.sentence
    assert blocked.fix == "sudo ufw allow 6000/tcp"
    (other,) = judge(FirewallFacts("another", False))
    assert other.fix.startswith("Here: ")
    (proven,) = judge(FirewallFacts("ufw", None), came_in=("mac-studio",))
    assert proven.state == "ok"
    assert "mac-studio" in proven.sentence


@pytest.mark.parametrize("name", sorted({*CHECKS, *checks.CHECKS}))
def test_each_check_has_a_page(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# `{name}`: ")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    assert parts[1::2] == ["What is checked", "What to do"]
    assert all(body.strip() for body in parts[2::2])
    assert f"[`{name}`]({name}.md)" in (PAGES / "README.md").read_text(encoding="utf-8")


def test_no_page_without_a_check() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} - {"README"} == {*CHECKS, *checks.CHECKS}


# what is read


def test_torch_is_read_from_its_own_file() -> None:
    text = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    assert parsers.torch_built_for(text) == ("13.0", "")
    assert parsers.torch_built_for(text.replace("'13.0'", "None")) == ("", "")
    assert parsers.torch_built_for("cuda = None\nhip = '7.2'") == ("", "7.2")
    assert parsers.torch_built_for("") == ("", "")


def test_cards_are_read_from_the_driver() -> None:
    listed = "GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\nGPU 1: NVIDIA T4 (UUID: GPU-2)\n"
    assert parsers.nvidia_cards(listed) == ("NVIDIA GeForce RTX 4090", "NVIDIA T4")
    assert parsers.nvidia_cards("No devices found.") == ()


def test_file_system_is_that_of_nearest_mount() -> None:
    mounts = [("/", "ext4"), ("/home", "nfs4"), ("/home/anna", "btrfs")]
    assert parsers.filesystem_of("/home/anna/state", mounts) == "btrfs"
    assert parsers.filesystem_of("/home/annabel", mounts) == "nfs4"
    assert parsers.filesystem_of("/var", mounts) == "ext4"
    assert parsers.filesystem_of(r"C:\Users\a", [("C:\\", "NTFS"), ("D:\\", "FAT")]) == "NTFS"


def test_ufw_output_is_parsed() -> None:
    assert parsers.ufw_is_on("# comment\nENABLED=yes\n")
    assert not parsers.ufw_is_on("ENABLED=no\n")
    status = (
        "Status: active\n\nTo                         Action      From\n--                         ------\n"
        "22/tcp                     ALLOW       Anywhere\n6000:6010/tcp              ALLOW       Anywhere\n"
        "7000                       DENY        Anywhere\n"
    )
    assert parsers.ufw_lets_in(status, 6005)
    assert not parsers.ufw_lets_in(status, 7000)
    assert not parsers.ufw_lets_in(status, 52416)
    assert parsers.ufw_lets_in("Anywhere                   ALLOW       192.168.1.0/24", 52416)


def test_firewalld_output_is_parsed() -> None:
    assert parsers.firewalld_lets_in("1025-65535/udp 1025-65535/tcp", 52416)
    assert not parsers.firewalld_lets_in("1025-65535/udp 22/tcp", 52416)
    assert not parsers.firewalld_lets_in("", 52416)


def nft(policy: str, *rules: list[object]) -> str:
    place = {"family": "inet", "table": "filter", "chain": "input"}
    chain = {"family": "inet", "table": "filter", "name": "input", "hook": "input", "policy": policy}
    objects = [{"metainfo": {}}, {"chain": chain}, *({"rule": {**place, "expr": rule}} for rule in rules)]
    return json.dumps({"nftables": objects})


def to_port(right: object, protocol: str = "tcp") -> dict[str, object]:
    left = {"payload": {"protocol": protocol, "field": "dport"}}
    return {"match": {"op": "==", "left": left, "right": right}}


ACCEPT, DROP, JUMP = {"accept": None}, {"drop": None}, {"jump": {"target": "x"}}
OLD = {"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established", "related"]}}
LOCAL = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "lo"}}
FROM_HOME = {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": "x"}}


@pytest.mark.parametrize(
    ("ruleset", "lets_in"),
    [
        (nft("accept"), True),
        (nft("drop"), False),
        (nft("drop", [OLD, ACCEPT], [LOCAL, ACCEPT]), False),
        (nft("drop", [to_port(6000), ACCEPT]), True),
        (nft("drop", [to_port(6001), ACCEPT]), False),
        (nft("drop", [to_port({"set": [22, {"range": [5999, 6001]}]}), ACCEPT]), True),
        (nft("drop", [to_port(6000, "udp"), ACCEPT]), False),
        (nft("accept", [to_port(6000), DROP]), False),
        (nft("accept", [OLD, ACCEPT], [DROP]), False),
        (nft("drop", [FROM_HOME, to_port(6000), ACCEPT]), None),
        (nft("drop", [JUMP]), None),
        (nft("accept", [JUMP]), True),
        ('{"nftables": []}', True),
        ("no json", None),
        ('{"nftables": [{"chain": 3}]}', None),
    ],
)
def test_nftables_rules_are_parsed(ruleset: str, lets_in: bool | None) -> None:
    assert parsers.nft_lets_in(ruleset, 6000) is lets_in


def test_macos_firewall_output_is_parsed() -> None:
    on, off = "Firewall is enabled. (State = 1)", "Firewall is disabled. (State = 0)"
    allowed = "Incoming connection to the application is permitted"
    assert parsers.macos_firewall(off, "", "") == (False, None)
    assert parsers.macos_firewall(on, "Firewall has block all state set to disabled.", "") == (True, None)
    assert parsers.macos_firewall(on, "Firewall has block all state set to enabled.", allowed) == (
        True,
        False,
    )
    assert parsers.macos_firewall(on, "Block all DISABLED! ", allowed) == (True, True)
    assert parsers.macos_firewall(on, "Block all DISABLED! ", "The application is blocked") == (True, False)


def test_windows_firewall_output_is_parsed() -> None:
    assert parsers.windows_firewall_is_on(["", "\n    EnableFirewall    REG_DWORD    0x1\n"])
    assert not parsers.windows_firewall_is_on(["    EnableFirewall    REG_DWORD    0x0"])


def test_sleep_settings_are_parsed() -> None:
    assert parsers.logind_idle_s(["[Login]\n#IdleAction=suspend\n"]) == 0
    assert parsers.logind_idle_s(["IdleAction=suspend\nIdleActionSec=20min\n"]) == 1200
    assert parsers.logind_idle_s(["IdleAction=suspend\n", "IdleAction=ignore\n"]) == 0
    assert parsers.gnome_idle_s("'suspend'\n", "900\n") == 900
    assert parsers.gnome_idle_s("'nothing'\n", "900\n") == 0
    assert parsers.gnome_idle_s("", "") is None
    custom = "Battery Power:\n sleep          1\nAC Power:\n displaysleep   10\n sleep          0\n"
    assert parsers.pmset_idle_s(custom) == 0
    assert parsers.pmset_idle_s(" sleep                15 (sleep prevented by x)\n") == 900
    assert parsers.pmset_idle_s("") is None
    german = "  Index der aktuellen Wechselstromeinstellung: 0x00000708\r\n  Gleichstrom: 0x00000384\r\n"
    assert parsers.powercfg_idle_s(german) == 1800
    assert parsers.powercfg_idle_s("") is None


def test_bridges_of_macos() -> None:
    text = (
        "en2: flags=8963<UP> mtu 1500\n\tstatus: active\n"
        "en3: flags=8963<UP> mtu 1500\n\tstatus: active\n"
        "en4: flags=8963<UP> mtu 1500\n\tstatus: inactive\n"
        "bridge0: flags=8863<UP> mtu 1500\n\tmember: en2 flags=3<LEARNING,DISCOVER>\n"
        "\t        ifmaxaddr 0 port 9\n\tmember: en3 flags=3<LEARNING,DISCOVER>\n"
        "\tmember: en4 flags=3<LEARNING,DISCOVER>\n\tstatus: active\n"
    )
    ports = {"en2": "Thunderbolt 1", "en3": "Thunderbolt 2", "en4": "Thunderbolt 3"}
    assert parsers.macos_bridges(text, ports) == (BridgeFacts("bridge0", ("en2", "en3")),)
    safe = text.replace("LEARNING,DISCOVER", "LEARNING,DISCOVER,STP")
    assert parsers.macos_bridges(safe, ports) == (BridgeFacts("bridge0", ("en2", "en3"), stp=True),)
    assert parsers.macos_bridges(text, {**ports, "en3": "Ethernet"})[0].members == ("en2",)


@given(st.text(), st.text(), st.integers(1, 65535))
def test_no_text_of_the_system_can_harm(text: str, other: str, port: int) -> None:
    parsers.torch_built_for(text)
    parsers.nvidia_cards(text)
    parsers.filesystem_of(text, [(other, "x")])
    parsers.ufw_lets_in(text, port)
    parsers.firewalld_lets_in(text, port)
    parsers.nft_lets_in(text, port)
    parsers.macos_firewall(text, other, text)
    parsers.logind_idle_s([text, f"IdleAction={other}"])
    parsers.gnome_idle_s(text, other)
    parsers.pmset_idle_s(text)
    parsers.powercfg_idle_s(text)
    parsers.macos_bridges(f"bridge0: flags={text}", {})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["chain", "rule", "hook", "family", "table", "name", "policy", "expr", "match"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.lists(json_values, max_size=4))
def test_no_ruleset_can_harm(objects: list[object]) -> None:
    assert parsers.nft_lets_in(json.dumps({"nftables": objects}), 1) in (True, False, None)


# what is gathered


class System:
    """Answers commands by their words; all others are not installed."""

    def __init__(self, answers: dict[str, tuple[int, str]] | None = None) -> None:
        self.answers = answers or {}

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        line = " ".join(command)
        for start, (code, text) in self.answers.items():
            if line.startswith(start):
                return subprocess.CompletedProcess(list(command), code, text, "")
        return subprocess.CompletedProcess(list(command), NOT_FOUND, "", "not found")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_cards_without_a_driver_are_seen_on_the_bus(tmp_path: Path) -> None:
    assert collect.nvidia(System(), tmp_path) == NvidiaFacts()
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    write(card / "vendor", "0x10de\n")
    write(card / "class", "0x030000\n")
    write(tmp_path / "sys/bus/pci/devices/0000:01:00.1/vendor", "0x10de\n")
    write(tmp_path / "sys/bus/pci/devices/0000:01:00.1/class", "0x040300\n")  # its sound
    assert collect.nvidia(System(), tmp_path) == NvidiaFacts(("an NVIDIA card",))
    broken = System({"nvidia-smi": (9, "Failed to initialize NVML:\n Driver/library version mismatch\n")})
    assert "mismatch" in collect.nvidia(broken, tmp_path).trouble
    works = System({"nvidia-smi": (0, "GPU 0: NVIDIA T4 (UUID: x)\n")})
    assert collect.nvidia(works, tmp_path) == NvidiaFacts(("NVIDIA T4",), driver=True)


@pytest.mark.skipif(sys.platform == "win32", reason="modes of Unix")
def test_key_file_facts_are_collected(tmp_path: Path) -> None:
    assert not collect.key(tmp_path, "ext4", tmp_path).exists
    key = write(tmp_path / "node.key", "secret")
    key.chmod(0o640)
    key_facts = collect.key(tmp_path, "ext4", tmp_path)
    assert key_facts.mode is not None
    assert key_facts.mode & 0o777 == 0o640
    assert key_facts.is_own
    assert machine_checks.key(key_facts).state == "fail"
    write(tmp_path / "etc/machine-id", "x")
    os.utime(key, (1e9, 1e9))
    cloned = machine_checks.cloned_key(collect.key(tmp_path, "ext4", tmp_path))
    assert cloned is not None
    assert cloned.state == "warn"
    write(tmp_path / ".dockerenv", "")
    assert collect.key(tmp_path, "overlay", tmp_path).in_image
    assert not collect.key(tmp_path, "ext4", tmp_path).in_image


def test_disk_facts_of_real_directory_are_collected(tmp_path: Path) -> None:
    disk_facts = collect.disk(tmp_path)
    assert disk_facts.free_bytes is not None
    assert not disk_facts.remote


def test_port_is_free_ours_or_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from barnraise.transport.listener.bind import open_port

    with open_port(0, any_port=False) as door:
        number = door.getsockname()[1]
        taken = collect.port(number, tmp_path)
        assert not taken.free
        assert not taken.ours
        standing = ListenerStanding(bytes(32), number, [], "tls", 0, 1, "0.1", agent=True)
        monkeypatch.setattr(collect, "standing_of", lambda _: standing)
        assert collect.port(number, tmp_path).ours
    monkeypatch.setattr(collect, "standing_of", lambda _: None)
    assert collect.port(number, tmp_path).free


def test_wsl_is_known_by_its_kernel() -> None:
    nat = System({"wslinfo": (0, "nat\n")})
    assert collect.wsl(nat, "6.8.0-generic") == WslFacts()
    assert collect.wsl(nat, "5.15.153.1-microsoft-standard-WSL2") == WslFacts(2, "nat")
    assert collect.wsl(System(), "5.15.153.1-microsoft-standard-WSL2") == WslFacts(2, "")
    assert collect.wsl(System(), "4.4.0-19041-Microsoft") == WslFacts(1)


def test_sleep_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "SYSTEM", "linux")
    monkeypatch.setattr(collect, "_runs", lambda _: False)
    monkeypatch.setenv("XDG_CURRENT_DESKTOP", "")
    assert collect.sleep(System(), tmp_path) == SleepFacts(None, "logind")
    masked = System({"systemctl is-enabled": (1, "masked\n")})
    assert collect.sleep(masked, tmp_path).after_s == 0
    write(tmp_path / "etc/systemd/logind.conf", "[Login]\n")
    assert collect.sleep(System(), tmp_path).after_s == 0
    write(tmp_path / "etc/systemd/logind.conf.d/a.conf", "IdleAction=suspend\nIdleActionSec=600\n")
    assert collect.sleep(System(), tmp_path).after_s == 600
    (tmp_path / "etc/systemd/logind.conf.d/a.conf").unlink()
    monkeypatch.setenv("XDG_CURRENT_DESKTOP", "ubuntu:GNOME")
    name = "gsettings get org.gnome.settings-daemon.plugins.power sleep-inactive-ac"
    gnome = System({f"{name}-type": (0, "'suspend'\n"), f"{name}-timeout": (0, "1200\n")})
    assert collect.sleep(gnome, tmp_path).after_s == 1200


@pytest.mark.parametrize(
    ("system", "answers", "after_s"),
    [
        ("macos", {"pmset -g custom": (0, "AC Power:\n sleep 10\n")}, 600),
        ("windows", {"powercfg /query": (0, "AC: 0x00000000\nDC: 0x00000384\n")}, 0),
        ("windows", {}, None),
    ],
)
def test_sleep_settings_of_other_systems_are_collected(
    system: str, answers: dict[str, tuple[int, str]], after_s: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "SYSTEM", system)
    assert collect.sleep(System(answers)).after_s == after_s


def test_firewalls_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "SYSTEM", "linux")

    def look(answers: dict[str, tuple[int, str]]) -> list[FirewallFacts]:
        return collect.firewalls(System(answers), 6000, tmp_path)

    assert look({}) == []
    assert look({"nft": (1, "")}) == []
    assert look({"nft": (0, nft("accept"))}) == []
    assert look({"nft": (0, nft("drop"))}) == [FirewallFacts("nftables", False)]
    daemon = {"firewall-cmd --state": (0, "running\n"), "firewall-cmd --get-default-zone": (0, "home\n")}
    assert look(daemon)[0].lets_in is None
    assert look({**daemon, "firewall-cmd --list-ports": (0, "22/tcp\n")})[0].lets_in is False
    assert look({**daemon, "firewall-cmd --list-ports": (0, "6000/tcp\n")})[0].lets_in is True
    write(tmp_path / "etc/ufw/ufw.conf", "ENABLED=yes\n")
    assert look({"ufw status": (1, "ERROR: You need to be root")})[0].lets_in is None
    assert look({"ufw status": (0, "Status: active\n6000/tcp  ALLOW  Anywhere\n")})[0].lets_in is True
    assert look({"ufw status": (0, "Status: active\n")}) == [FirewallFacts("ufw", False)]


def test_firewalls_of_other_systems_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "SYSTEM", "windows")
    on = {"reg query": (0, "    EnableFirewall    REG_DWORD    0x1\n")}
    assert collect.firewalls(System(), 6000) == []
    assert collect.firewalls(System(on), 6000)[0].lets_in is None
    assert collect.firewalls(System({**on, "netsh": (0, "")}), 6000)[0].lets_in is True
    monkeypatch.setattr(collect, "SYSTEM", "macos")
    alf = "/usr/libexec/ApplicationFirewall/socketfilterfw"
    assert collect.firewalls(System(), 6000) == []
    blocked = {
        f"{alf} --getglobalstate": (0, "Firewall is enabled. (State = 1)"),
        f"{alf} --getappblocked": (0, "Incoming connections are blocked"),
    }
    assert collect.firewalls(System(blocked), 6000)[0].lets_in is False


def test_bridges_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "SYSTEM", "linux")
    net = tmp_path / "sys/class/net"
    write(net / "br0/bridge/stp_state", "0\n")
    for name in ("thunderbolt0", "thunderbolt1", "eth0"):
        write(net / name / "operstate", "up\n")
        write(net / "br0/brif" / name, "")
    assert collect.bridges(System(), tmp_path) == [BridgeFacts("br0", ("thunderbolt0", "thunderbolt1"))]
    write(net / "thunderbolt1/operstate", "down\n")
    assert collect.bridges(System(), tmp_path)[0].members == ("thunderbolt0",)


# the command


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine about which nothing can be seen, and no agent."""
    monkeypatch.setattr(doctor, "runner", lambda _: System())
    monkeypatch.setattr(collect, "SYSTEM", "linux")
    monkeypatch.setattr(collect, "standing_of", lambda _: None)
    monkeypatch.setattr(collect, "nvidia", lambda run: NvidiaFacts())
    monkeypatch.setattr(collect, "torch", lambda: GOOD_TORCH)
    monkeypatch.setattr(collect, "sleep", lambda run: SleepFacts(0, "logind"))
    monkeypatch.setattr(collect, "firewalls", lambda run, number: [])
    monkeypatch.setattr(collect, "bridges", lambda run: [])
    monkeypatch.setattr(collect, "disk", lambda directory: DiskFacts(str(directory), 2**40, "ext4"))
    monkeypatch.setattr(collect, "port", lambda number, directory: PortFacts(number))
    monkeypatch.setattr(doctor, "ask", _no_agent)
    monkeypatch.setattr(doctor, "DeadlineCall", Patient)


class Patient(DeadlineCall[Any]):
    """A busy machine may take longer than is given to a look; one of them may hang in a test."""

    def result(self, deadline: float) -> Any:
        return super().result(deadline if self.names == ("sleep",) else deadline + 60.0)


def _no_agent(question: object, expected: type, *, timeout_s: float, offer_start: bool) -> CheckResponse:
    assert not offer_start, "it must never ask a person"
    assert timeout_s <= 10
    raise AgentError("no agent runs on this machine")


def _agent(*rows: CheckRow) -> Callable[..., CheckResponse]:
    def ask(question: object, expected: type, *, timeout_s: float, offer_start: bool) -> CheckResponse:
        assert isinstance(question, CheckRequest)
        return CheckResponse(rows)

    return ask


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["barnraise", "doctor", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.mark.usefixtures("calm")
def test_without_an_agent_it_says_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch) == 0
    out = capsys.readouterr().out
    assert "warn  agent" in out
    assert "-> barnraise up --detach" in out
    _, _, left = " ".join(out.split()).partition("not checked: ")
    assert "reach" in left
    assert "(no agent runs on this machine)" in left
    assert "clock" not in left, "that one was made without the agent"


@pytest.mark.usefixtures("calm")
def test_failures_are_last_with_peer_and_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        CheckRow("reach", "fail", "gaming-pc cannot be dialled", "On gaming-pc: open it", "gaming-pc"),
        CheckRow("versions", "ok", "Barnraise 0.1.0", peer="mac"),
        CheckRow("quorum", "warn", "careful", "be careful"),
    )
    monkeypatch.setattr(doctor, "ask", _agent(*rows))
    assert command(monkeypatch, "--all") == 1
    lines = capsys.readouterr().out.splitlines()
    states = [line.split()[0] for line in lines if line.split()[:1] in (["ok"], ["warn"], ["FAIL"])]
    assert states == sorted(states, key=["ok", "warn", "FAIL"].index)
    last = next(index for index, line in enumerate(lines) if line.startswith("FAIL"))
    assert "gaming-pc cannot be dialled" in lines[last]
    assert lines[last + 1].strip() == "-> On gaming-pc: open it"
    assert any("versions" in line and "mac: Barnraise 0.1.0" in line for line in lines)
    assert re.fullmatch(r"\d+ checks passed, 2 warnings, 1 failure", lines[0])
    assert "barnraise explain reach" in lines[-1]


@pytest.mark.usefixtures("calm")
def test_checks_that_passed_are_only_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ask", _agent(CheckRow("quorum", "warn", "careful", "be careful")))
    monkeypatch.setattr(collect, "running", lambda directory: AgentFacts(__version__, 7, True))
    assert command(monkeypatch) == 0
    first, _, *others = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ checks passed, 1 warning", first)
    assert [line for line in others if line] == [
        "warn  quorum  careful",
        "      -> be careful",
        "More: barnraise explain quorum",
    ]


def test_only_passed_checks_are_one_line() -> None:
    rows = tuple(CheckRow(name, "ok", "fine") for name in ("disk", "key"))
    diagnosis = doctor.Diagnosis(True, __version__, rows, ())
    assert doctor.describe(diagnosis) == "2 checks passed"
    assert "ok    disk  fine" in doctor.describe(diagnosis, everything=True).splitlines()


def test_long_sentence_is_wrapped_and_its_fix_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = CheckRow("reach", "fail", "word " * 40, "sudo " + "x" * 90)
    lines = doctor.describe(doctor.Diagnosis(False, __version__, (row,), ())).splitlines()
    assert [line for line in lines if len(line) > 80] == [f"      -> {row.fix}"]


@pytest.mark.usefixtures("calm")
def test_doctor_as_json_has_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["version"] == __version__
    assert {row["name"] for row in report["rows"]} >= {"python", "torch", "disk", "port", "firewall"}
    assert "reach" in report["left_out"][0]["names"]


@pytest.mark.usefixtures("calm")
def test_inbound_peer_proves_open_firewall(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collect, "firewalls", lambda run, number: [FirewallFacts("ufw")])
    assert command(monkeypatch) == 0
    assert "warn  firewall" in capsys.readouterr().out
    both = checks.reach(_linked_both_ways(), checks.LocalFacts("here"))
    monkeypatch.setattr(doctor, "ask", _agent(both))
    assert command(monkeypatch, "--all") == 0
    assert re.search(r"^ok    firewall +ufw is active and allows mac", capsys.readouterr().out, re.MULTILINE)


def _linked_both_ways() -> checks.PeerFacts:
    from barnraise.agent.diagnostics.reachability import DialResult

    answered = DialResult("192.168.1.7", "answered", rtt_ms=0.4)
    return checks.PeerFacts("mac", paths=(checks.DialPath(answered),), dial_backs=(answered,))


@pytest.mark.usefixtures("calm")
def test_hubs_are_shown_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch) == 0
    assert "hub" not in capsys.readouterr().out.split()
    facts = [one_hub(HubAddressFacts(HOME, words=SILENT), kept=True, up=True)]
    monkeypatch.setattr(hub_checks, "hubs", lambda settings: facts)
    assert command(monkeypatch) == 1
    out = capsys.readouterr().out
    assert re.search("^FAIL  hub +the hub of friends is up here, but does not answer", out, re.MULTILINE)
    assert "barnraise explain hub" in out


@pytest.mark.usefixtures("calm")
def test_wrong_settings_are_a_finding_not_an_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BARNRAISE_NETWORK_PORT", "many")
    assert command(monkeypatch, "--all") == 1
    out = capsys.readouterr().out
    assert "FAIL  settings" in out
    assert "python" in out
    assert "not checked: agent, disk" in out


@pytest.mark.usefixtures("calm")
def test_one_look_that_hangs_or_breaks_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_over = threading.Event()

    def hang(run: object) -> SleepFacts:
        is_over.wait(120)
        return SleepFacts()

    def broken(run: object) -> NvidiaFacts:
        raise ValueError("what a surprise")

    monkeypatch.setattr(collect, "sleep", hang)
    monkeypatch.setattr(collect, "nvidia", broken)
    monkeypatch.setattr(doctor, "_LOOK_S", 0.3)
    began = time.monotonic()
    assert command(monkeypatch, "--all") == 0
    assert time.monotonic() - began < 60
    is_over.set()
    out = capsys.readouterr().out
    assert "not checked: gpu (the check failed: ValueError: what a surprise)" in out
    assert "not checked: sleep (it did not answer in time)" in out
    assert "ok    python" in out


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({}, None),
        ({"train.py": ""}, None),
        ({"requirements.txt": "numpy\n"}, "warn"),
        ({"requirements.txt": "numpy\n", "requirements.lock": "numpy==2 --hash=sha256:aa"}, "ok"),
        ({"requirements.txt": "-e ."}, "warn"),
        ({"requirements.txt": "numpy", "uv.lock": "", "pyproject.toml": ""}, "ok"),
    ],
)
def test_requirements_of_the_folder_are_checked_for_hashes(
    tmp_path: Path, files: dict[str, str], state: str | None
) -> None:
    """Tries a folder whose packages the index may replace: the doctor must say so."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    row = machine_checks.requirements(collect.requirements(tmp_path))
    assert (row.state if row is not None else None) == state
