"""Judges the machine itself: Python, torch, cards, disk, key, clock and sleep. Pure."""

from __future__ import annotations

import time

from barnraise.agent.diagnostics.checks import ENOUGH_FREE_BYTES, LEAST_FREE_BYTES, clock_fix
from barnraise.agent_client.cluster_requests import CheckRow
from barnraise.cli.doctor.facts import (
    DiskFacts,
    KeyFacts,
    NvidiaFacts,
    RequirementsFacts,
    SleepFacts,
    TorchFacts,
)
from barnraise.core.installation import TESTED_RANGE, install_hint, is_tested
from barnraise.core.units import counted

_FIRST_PYTHON = (3, 11)
_UNTESTED_PYTHON = (3, 15)
_DAY_S = 86400.0
_YEAR_2100_S = 4102444800.0


def python(version: tuple[int, int, int], bits: int) -> CheckRow:
    shown = ".".join(map(str, version))
    if version < _FIRST_PYTHON or bits < 64:
        what = f"Python {shown} is too old" if bits >= 64 else f"Python {shown} is a 32-bit program"
        return CheckRow(
            "python",
            "fail",
            f"{what}; Barnraise and torch need 3.11 or newer, 64 bits",
            "uv python install 3.12",
        )
    if version >= _UNTESTED_PYTHON:
        return CheckRow(
            "python", "warn", f"Python {shown} was not tested with Barnraise", "uv python install 3.14"
        )
    return CheckRow("python", "ok", shown)


def barnraise(running: str, recorded: str | None) -> CheckRow:
    """Check the installed version. ``recorded``: version in the environment's package list; None in a source
    tree.
    """
    if recorded is not None and recorded != running:
        return CheckRow(
            "barnraise",
            "warn",
            f"the code is {running}, but the environment's record says {recorded}: an upgrade did not finish",
            install_hint(options="--force-reinstall --no-deps"),
        )
    return CheckRow("barnraise", "ok", running)


def torch(facts: TorchFacts, system: str, machine: str) -> CheckRow:
    if not facts.version:
        if system == "macos" and machine == "x86_64":
            return CheckRow(
                "torch",
                "warn",
                "there is no torch for Intel Macs, so this machine cannot train; it can vote",
                "barnraise up --witness",
            )
        return CheckRow(
            "torch", "warn", "torch is not installed here: this machine cannot train", "barnraise torch"
        )
    if not is_tested(facts.version):
        return CheckRow(
            "torch",
            "warn",
            f"torch {facts.version} was not tested with Barnraise (tested: {TESTED_RANGE})",
            "barnraise torch",
        )
    return CheckRow("torch", "ok", facts.version)


def gpu(nvidia: NvidiaFacts, facts: TorchFacts) -> CheckRow:
    """Check that torch can use each GPU of this machine."""
    if not nvidia.cards:
        return CheckRow("gpu", "ok", "no NVIDIA card")
    cards = ", ".join(nvidia.cards[:4])
    if nvidia.trouble:
        return CheckRow(
            "gpu",
            "fail",
            f"{cards}: its driver does not answer ({nvidia.trouble})",
            "Restart the machine; if the problem stays, install the driver again",
        )
    if not nvidia.driver:
        return CheckRow(
            "gpu",
            "warn",
            f"{cards}: no NVIDIA driver is loaded, so nothing can use it",
            "Install the driver (Ubuntu: sudo ubuntu-drivers install; Windows: the NVIDIA app)",
        )
    if facts.version and not facts.cuda and not facts.hip:
        return CheckRow(
            "gpu",
            "fail",
            f"torch {facts.version} is built for the CPU only and cannot use {cards}",
            "barnraise torch prints the command that installs the right one",
        )
    return CheckRow("gpu", "ok", cards)


def requirements(facts: RequirementsFacts | None) -> CheckRow | None:
    """Check that the packages of this folder's runs are fixed by hashes; None without such a file."""
    if facts is None:
        return None
    if facts.trouble:
        return CheckRow("requirements", "warn", facts.trouble, "barnraise explain requirements")
    if facts.unhashed:
        return CheckRow(
            "requirements",
            "warn",
            f"{facts.source} in this folder has {counted(facts.unhashed, 'requirement')} without a hash: "
            "a run installs what the package index then has",
            f"uv pip compile --universal --generate-hashes {facts.source} -o requirements.lock",
        )
    return CheckRow("requirements", "ok", f"{facts.source} fixes its packages by hashes")


def disk(facts: DiskFacts) -> CheckRow:
    if facts.free_bytes is None:
        return CheckRow(
            "disk", "warn", f"the free space of {facts.directory} cannot be seen", "Look with: df -h"
        )
    free = f"{facts.free_bytes / 2**30:.1f} GB free at {facts.directory}"
    if facts.free_bytes < LEAST_FREE_BYTES:
        return CheckRow(
            "disk",
            "fail",
            f"only {free}: the agent cannot keep its decisions",
            "Free some space, or set BARNRAISE_STATE_DIRECTORY to another disk",
        )
    if facts.free_bytes < ENOUGH_FREE_BYTES:
        return CheckRow("disk", "warn", f"only {free}", "Free some space before you train")
    return CheckRow("disk", "ok", free)


def network_disk(facts: DiskFacts) -> CheckRow:
    """Check that the state directory is on a local disk. On a network disk, locks and sockets fail, and two
    machines that share a home become one node.
    """
    if facts.remote:
        return CheckRow(
            "network-disk",
            "fail",
            f"the state directory {facts.directory} is on a network disk ({facts.filesystem or 'remote'}), "
            "where locks and sockets fail and two machines may share one key",
            "Set BARNRAISE_STATE_DIRECTORY to a directory on this machine's own disk, then pair again",
        )
    return CheckRow(
        "network-disk", "ok", f"the state directory is local ({facts.filesystem or 'unknown kind'})"
    )


def key(facts: KeyFacts) -> CheckRow:
    if not facts.exists:
        return CheckRow("key", "ok", "there is no node key yet; it is made when first needed")
    if not facts.is_own:
        return CheckRow(
            "key",
            "fail",
            f"{facts.path} belongs to another user",
            f'Was the agent started with sudo? sudo chown -R "$USER" {_directory(facts.path)}',
        )
    if facts.mode is not None and facts.mode & 0o077:
        return CheckRow(
            "key",
            "fail",
            f"others may read the node key {facts.path} (mode {facts.mode & 0o777:04o})",
            f"chmod 600 {facts.path}; if anyone could have read it, delete it and pair again",
        )
    return CheckRow("key", "ok", "the node key is for this user alone")


def cloned_key(facts: KeyFacts) -> CheckRow | None:
    """Look for signs that the key was copied to this disk. A running agent looks for the other machine."""
    if not facts.exists:
        return None
    copied = (
        facts.made_s is not None
        and facts.machine_made_s is not None
        and facts.machine_made_s > facts.made_s + _DAY_S
    )
    fix = (
        "If the other machine still exists: barnraise down here, delete the state directory "
        f"{_directory(facts.path)}, barnraise up, and pair this machine again"
    )
    if facts.in_image:
        return CheckRow(
            "cloned-key",
            "warn",
            f"the node key {facts.path} is inside a container's own disk: every container of this image "
            "would have the same",
            "Mount a volume at the state directory, one for each container, and build images without it",
        )
    if copied:
        return CheckRow(
            "cloned-key",
            "warn",
            "the node key is older than this installation of the system: it may have come with a copied disk",
            fix,
        )
    return CheckRow("cloned-key", "ok", "no sign of a copied disk")


def clock(now_s: float, installed_s: float, system: str) -> CheckRow:
    """Check the date of the clock: logs show it, and other programs reject certificates if it is wrong."""
    shown = time.strftime("%Y-%m-%d", time.gmtime(max(0.0, min(now_s, 2 * _YEAR_2100_S))))
    if now_s < installed_s - _DAY_S or now_s > _YEAR_2100_S:
        return CheckRow(
            "clock", "warn", f"the clock of this machine shows {shown}, which is wrong", clock_fix(system)
        )
    return CheckRow("clock", "ok", shown)


def sleep(facts: SleepFacts, system: str) -> CheckRow:
    """Check whether the machine goes to sleep: it leaves properly and returns, but it does not train
    meanwhile.
    """
    lid = "; closing the lid sends it to sleep as well" if facts.lid else ""
    if facts.after_s is None:
        note = "closing the lid sends this machine to sleep" if facts.lid else "no setting could be read"
        return CheckRow("sleep", "ok", note)
    if facts.after_s == 0:
        return CheckRow("sleep", "ok", f"this machine does not sleep automatically ({facts.by}){lid}")
    fix = {
        "linux": "gsettings set org.gnome.settings-daemon.plugins.power sleep-inactive-ac-type nothing, or "
        "for good: sudo systemctl mask sleep.target suspend.target",
        "macos": "sudo pmset -c sleep 0",
        "windows": "powercfg /change standby-timeout-ac 0",
    }.get(system, "Switch it off in the system's settings")
    return CheckRow(
        "sleep",
        "warn",
        f"this machine sleeps after {facts.after_s / 60:.0f} min without use ({facts.by}); runs go on "
        f"without it and it returns when it wakes{lid}",
        fix,
    )


def _directory(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[0] or path
