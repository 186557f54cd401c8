"""Looks at this machine: only reads, each command with a deadline; what cannot be seen stays unknown."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from barnraise.agent.diagnostics.interfaces import hardware_ports
from barnraise.agent_client.bootstrap import standing_of
from barnraise.cli.doctor import parsers
from barnraise.cli.doctor.facts import (
    AgentFacts,
    BridgeFacts,
    DiskFacts,
    FirewallFacts,
    KeyFacts,
    NvidiaFacts,
    PortFacts,
    RequirementsFacts,
    SleepFacts,
    TorchFacts,
    WslFacts,
)
from barnraise.core.command import NOT_FOUND, Run
from barnraise.core.errors import BarnraiseError, ListenerError, RunEnvironmentError
from barnraise.environments.build_plan import SOURCES, plan_environment
from barnraise.transport.listener.bind import open_port

SYSTEM = {"linux": "linux", "darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
_LARGEST_FILE = 256 * 1024
_ALF = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_POLICY = r"HKLM\SYSTEM\CurrentControlSet\Services\SharedAccess\Parameters\FirewallPolicy"
_GNOME = "org.gnome.settings-daemon.plugins.power"


def recorded_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch() -> TorchFacts:
    """Read torch's version from its files: an import takes seconds, and a broken torch may crash."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return TorchFacts()
    cuda, hip = parsers.torch_built_for(_read(Path(str(distribution.locate_file("torch/version.py")))))
    return TorchFacts(distribution.version, cuda, hip)


def nvidia(run: Run, root: Path = Path("/")) -> NvidiaFacts:
    done = run(["nvidia-smi", "-L"])
    cards = parsers.nvidia_cards(done.stdout)
    if cards:
        return NvidiaFacts(cards, driver=True)
    shown = tuple("an NVIDIA card" for _ in (root / "proc/driver/nvidia/gpus").glob("*"))
    on_bus = tuple("an NVIDIA card" for _ in _nvidia_on_bus(root))
    if done.returncode not in (0, NOT_FOUND) and (shown or on_bus):
        return NvidiaFacts(shown or on_bus, driver=True, trouble=_one_line(done.stdout or done.stderr))
    return NvidiaFacts(shown or on_bus, driver=bool(shown))


def _nvidia_on_bus(root: Path) -> Iterator[Path]:
    """Display controllers of NVIDIA; the same vendor makes other things, too."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _read(device / "vendor").strip() == "0x10de" and _read(device / "class").startswith("0x03"):
            yield device


def requirements(folder: Path) -> RequirementsFacts | None:
    """Return the file from which a run of this folder would install packages; None if there is none."""
    names = (*SOURCES, "pyproject.toml")
    files = {name: _read(folder / name).encode() for name in names if (folder / name).is_file()}
    try:
        plan = plan_environment(files, "auto")
    except RunEnvironmentError as error:
        return RequirementsFacts("requirements", trouble=error.message)
    return RequirementsFacts(plan.source, plan.unhashed) if plan.kind != "agent" else None


def disk(directory: Path) -> DiskFacts:
    free: int | None = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(directory).free
    mounts = [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    resolved = str(directory.resolve())
    kind = parsers.filesystem_of(resolved, mounts)
    remote = kind.lower() in parsers.REMOTE or resolved.startswith("\\\\")
    return DiskFacts(str(directory), free, kind, remote)


def key(directory: Path, filesystem: str, root: Path = Path("/")) -> KeyFacts:
    path = directory / "node.key"
    try:
        facts = path.stat()
    except OSError:
        return KeyFacts(str(path), exists=path.is_symlink())
    made: float | None = None
    with contextlib.suppress(OSError):
        made = (root / "etc/machine-id").stat().st_mtime
    contained = any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
    return KeyFacts(
        path=str(path),
        mode=facts.st_mode if sys.platform != "win32" else None,
        is_own=not hasattr(os, "geteuid") or facts.st_uid == os.geteuid(),
        made_s=facts.st_mtime,
        machine_made_s=None if contained else made,
        in_image=contained and filesystem == "overlay",
    )


def running(directory: Path) -> AgentFacts:
    try:
        standing = standing_of(directory)
    except BarnraiseError as error:
        return AgentFacts(trouble=error.message)
    if standing is None:
        return AgentFacts()
    return AgentFacts(standing.listener_version, standing.pid, standing.agent)


def port(number: int, directory: Path) -> PortFacts:
    with contextlib.suppress(BarnraiseError):
        standing = standing_of(directory)
        if standing is not None and standing.port == number:
            return PortFacts(number, ours=True)
    try:
        open_port(number, any_port=False).close()
    except ListenerError:
        return PortFacts(number, free=False, holder=_holder(number))
    return PortFacts(number)


def _holder(number: int) -> str:
    """Return the name of the program that listens on a port, if the system tells it."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == number and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def wsl(run: Run, release: str | None = None) -> WslFacts:
    name = platform.release() if release is None else release
    if "microsoft" not in name.lower():
        return WslFacts()
    if "Microsoft" in name and "WSL2" not in name:
        return WslFacts(1)
    done = run(["wslinfo", "--networking-mode"])
    return WslFacts(2, done.stdout.strip().lower() if done.returncode == 0 else "")


def sleep(run: Run, root: Path = Path("/")) -> SleepFacts:
    if SYSTEM == "macos":
        seconds = parsers.pmset_idle_s(run(["pmset", "-g", "custom"]).stdout)
        return SleepFacts(
            seconds, "pmset, on mains power", lid="InternalBattery" in run(["pmset", "-g", "batt"]).stdout
        )
    if SYSTEM == "windows":
        command = ["powercfg", "/query", "SCHEME_CURRENT", "SUB_SLEEP", "STANDBYIDLE"]
        return SleepFacts(parsers.powercfg_idle_s(run(command).stdout), "powercfg, on mains power")
    return _sleep_of_linux(run, root)


def _sleep_of_linux(run: Run, root: Path) -> SleepFacts:
    lid = (root / "proc/acpi/button/lid").exists()
    masked = run(["systemctl", "is-enabled", "sleep.target"])
    if masked.stdout.strip() == "masked":
        return SleepFacts(0, "sleep.target is masked")
    files = [root / "etc/systemd/logind.conf"]
    for folder in ("usr/lib/systemd/logind.conf.d", "etc/systemd/logind.conf.d"):
        files += sorted((root / folder).glob("*.conf"))
    seconds = parsers.logind_idle_s(map(_read, files))
    if seconds:
        return SleepFacts(seconds, "logind", lid)
    if "GNOME" in os.environ.get("XDG_CURRENT_DESKTOP", "") or _runs("gsd-power"):
        kind = run(["gsettings", "get", _GNOME, "sleep-inactive-ac-type"])
        after = run(["gsettings", "get", _GNOME, "sleep-inactive-ac-timeout"])
        return SleepFacts(parsers.gnome_idle_s(kind.stdout, after.stdout), "GNOME, on mains power", lid)
    known = files[0].exists() or masked.returncode != NOT_FOUND
    return SleepFacts(0 if known else None, "logind", lid)


def firewalls(run: Run, number: int, root: Path = Path("/")) -> list[FirewallFacts]:
    """Return the active firewalls. Linux shows its rules to root only; without root they are unknown."""
    if SYSTEM == "macos":
        answers = [run([_ALF, f"--{what}"]).stdout for what in ("getglobalstate", "getblockall")]
        app = run([_ALF, "--getappblocked", os.path.realpath(sys.executable)]).stdout
        on, lets_in = parsers.macos_firewall(answers[0], answers[1], app)
        return [FirewallFacts("the firewall of macOS", lets_in)] if on else []
    if SYSTEM == "windows":
        profiles = ("StandardProfile", "PublicProfile")
        outputs = [
            run(["reg", "query", f"{_POLICY}\\{name}", "/v", "EnableFirewall"]).stdout for name in profiles
        ]
        if not parsers.windows_firewall_is_on(outputs):
            return []
        rule = run(["netsh", "advfirewall", "firewall", "show", "rule", "name=Barnraise"])
        return [FirewallFacts("the firewall of Windows", True if rule.returncode == 0 else None)]
    return _firewalls_of_linux(run, number, root)


def _firewalls_of_linux(run: Run, number: int, root: Path) -> list[FirewallFacts]:
    if parsers.ufw_is_on(_read(root / "etc/ufw/ufw.conf")):
        status = run(["ufw", "status"])
        known = status.returncode == 0 and "Status: active" in status.stdout
        return [
            FirewallFacts(
                "ufw", parsers.ufw_lets_in(status.stdout, number) if known else None, _only_root(known)
            )
        ]
    if run(["firewall-cmd", "--state"]).stdout.strip() == "running":
        ports = run(["firewall-cmd", "--list-ports"])
        zone = run(["firewall-cmd", "--get-default-zone"]).stdout.strip()
        known = ports.returncode == 0
        lets_in = zone == "trusted" or parsers.firewalld_lets_in(ports.stdout, number) if known else None
        return [FirewallFacts("firewalld", lets_in, _only_root(known))]
    rules = run(["nft", "-j", "list", "ruleset"])
    if rules.returncode != 0:
        return []
    lets_in = parsers.nft_lets_in(rules.stdout, number)
    return [FirewallFacts("nftables", lets_in)] if lets_in is not True else []


def bridges(run: Run, root: Path = Path("/")) -> list[BridgeFacts]:
    if SYSTEM == "macos":
        ports = hardware_ports(run(["networksetup", "-listallhardwareports"]).stdout)
        return list(parsers.macos_bridges(run(["ifconfig", "-a"]).stdout, ports))
    facts = []
    for folder in sorted((root / "sys/class/net").glob("*/bridge")):
        members = [link.name for link in sorted((folder.parent / "brif").glob("*"))]
        up = [name for name in members if _is_thunderbolt(root, name)]
        facts.append(
            BridgeFacts(folder.parent.name, tuple(up), _read(folder / "stp_state").strip() not in ("", "0"))
        )
    return facts


def _is_thunderbolt(root: Path, name: str) -> bool:
    interface = root / "sys/class/net" / name
    if _read(interface / "operstate").strip() not in ("up", "unknown"):
        return False
    driver = interface / "device/driver"
    return name.startswith("thunderbolt") or "thunderbolt" in os.path.basename(os.path.realpath(driver))


def installed_s() -> float:
    """Return when this Barnraise was installed; the clock cannot be earlier."""
    import barnraise

    try:
        return Path(barnraise.__file__).stat().st_mtime
    except OSError:
        return 0.0


def _only_root(known: bool) -> str:
    return "" if known else "its rules are shown to root only"


def _runs(name: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return any(process.info["name"] == name for process in psutil.process_iter(["name"]))
    return False


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_FILE).decode("utf-8", "replace")
    except OSError:
        return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
