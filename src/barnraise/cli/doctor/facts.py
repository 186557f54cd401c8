"""Facts about this machine, before a check judges them. Pure. None and empty mean that a fact is unknown."""

from __future__ import annotations

from dataclasses import dataclass

# Every check of the command line; each has a page under docs/doctor (a test compares them).
CHECKS = (
    "agent",
    "barnraise",
    "bridge",
    "clock",
    "cloned-key",
    "disk",
    "firewall",
    "gpu",
    "hub",
    "key",
    "local-network",
    "network-disk",
    "port",
    "python",
    "requirements",
    "settings",
    "sleep",
    "torch",
    "wsl",
)


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch as its files describe it. ``cuda`` and ``hip``: what it was built for."""

    version: str = ""
    cuda: str = ""
    hip: str = ""


@dataclass(frozen=True)
class NvidiaFacts:
    """Cards that the bus or the driver shows; ``trouble``: why the driver does not answer."""

    cards: tuple[str, ...] = ()
    driver: bool = False
    trouble: str = ""


@dataclass(frozen=True)
class RequirementsFacts:
    """The file that a run of this folder installs packages from; ``unhashed``: those without a hash."""

    source: str
    unhashed: int = 0
    trouble: str = ""


@dataclass(frozen=True)
class DiskFacts:
    """Facts about the disk with the state directory."""

    directory: str
    free_bytes: int | None = None
    filesystem: str = ""
    remote: bool = False


@dataclass(frozen=True)
class KeyFacts:
    """The file of the node key."""

    path: str
    exists: bool = True
    mode: int | None = None
    is_own: bool = True
    made_s: float | None = None
    machine_made_s: float | None = None
    in_image: bool = False


@dataclass(frozen=True)
class PortFacts:
    """The machine's TCP port; ``holder``: another program that uses it."""

    number: int
    ours: bool = False
    free: bool = True
    holder: str = ""


@dataclass(frozen=True)
class AgentFacts:
    """Process behind the local socket: none, a listener or an agent. ``trouble``: why it was not asked."""

    version: str = ""
    pid: int = 0
    agent: bool = False
    trouble: str = ""


@dataclass(frozen=True)
class WslFacts:
    """Linux inside Windows; ``mode`` of its network as `wslinfo` says it."""

    version: int = 0
    mode: str = ""


@dataclass(frozen=True)
class SleepFacts:
    """After how long without use the machine sleeps (0: never), by whose word; ``lid``: closing it counts."""

    after_s: int | None = None
    by: str = ""
    lid: bool = False


@dataclass(frozen=True)
class FirewallFacts:
    """One firewall that is active; ``lets_in``: our port, as far as can be seen."""

    tool: str
    lets_in: bool | None = None
    words: str = ""


@dataclass(frozen=True)
class BridgeFacts:
    """A bridge of the system with the Thunderbolt ports in it that are up."""

    name: str
    members: tuple[str, ...] = ()
    stp: bool = False


@dataclass(frozen=True)
class HubAddressFacts:
    """An address of a hub, asked from here: whether the hub ``answers`` with its key, otherwise why not in
    words, and whether some ``other`` answered."""

    address: str
    answers: bool = False
    words: str = ""
    other: bool = False
    ahead_s: float | None = None  # its clock


@dataclass(frozen=True)
class HubFacts:
    """A hub that is ``kept`` here, or that this machine trains for."""

    name: str
    ways: tuple[HubAddressFacts, ...] = ()
    kept: bool = False
    up: bool = False  # a command keeps it now
    region: bool = False
