"""Commands inside network namespaces: ip, tc, nft and settings, with errors that say what failed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.janitor import NETNS

_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'


class LabError(RuntimeError):
    """A request that the lab cannot fulfil."""


def why_unavailable() -> str | None:
    """Return the reason why no lab can be made here; None if one can."""
    if sys.platform != "linux":
        return "the lab needs Linux network namespaces"
    if os.geteuid() != 0:
        return "the lab needs root: run it as root"
    missing = [tool for tool in ("ip", "tc", "nsenter", "nft") if shutil.which(tool) is None]
    if missing:
        return f"the lab needs {', '.join(missing)}: install iproute2, util-linux and nftables"
    return None


def inside(
    namespace: str, argv: Sequence[str], host_name: str | None = None, groups: Sequence[Path] = ()
) -> list[str]:
    """Return the command line that runs argv in the namespace. nsenter becomes argv: the pid is the
    program's.

    ``host_name``: the name of the computer that argv and its children see; None for the real one.
    ``groups``: folders of control groups that argv and its children are in.
    """
    command = ["nsenter", f"--net={NETNS / namespace}", "--"]
    if groups:
        command += ["sh", "-c", _ENTER, "sh", *map(str, groups), "--"]
    if host_name is not None:
        command += ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host_name]
    return [*command, *argv]


def execute(argv: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        given = f"\nwith:\n{text}" if text else ""
        raise LabError(f"{' '.join(argv)} failed: {done.stderr.strip() or done.stdout.strip()}{given}")
    return done.stdout


def ip(lines: Sequence[str], namespace: str | None = None) -> None:
    where = [] if namespace is None else ["-n", namespace]
    execute(["ip", *where, "-batch", "-"], "".join(line + "\n" for line in lines))


def configure(namespace: str, settings: dict[str, str], links: Sequence[str]) -> None:
    """Apply kernel settings (paths below /proc/sys/net), then ip lines, by one process in the namespace."""
    writes = "".join(f"echo {value} > /proc/sys/net/{path}\n" for path, value in settings.items())
    lines = "".join(line + "\n" for line in links)
    execute(inside(namespace, ["sh", "-e"]), f"{writes}ip -batch - <<'END'\n{lines}END\n")


def allow_cubic() -> None:
    """Let namespaces choose cubic, once per boot: the kernel keeps one list for all of them.

    It only widens the choice; the machine's own setting stays as it is.
    """
    allowed = _ALLOWED.read_text().split()
    if "cubic" not in allowed:
        _ALLOWED.write_text(" ".join([*allowed, "cubic"]))


def nft(namespace: str, lines: Sequence[str]) -> None:
    execute(inside(namespace, ["nft", "-f", "-"]), "".join(line + "\n" for line in lines))


def limit(namespace: str, device: str, bits: int | None) -> None:
    """Limit what leaves by this device to `bits` per second; None lifts the limit."""
    if bits is None:
        execute(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "1000"])
        return
    # 256 KiB is 2 ms at 1 Gbit/s, but 0.4 s at 5 Mbit/s: slow lines get a bucket of 20 ms.
    burst = min(256 << 10, max(32 << 10, bits // 8 // 50))
    queue = burst + max(bits // 8 // 50, 64 << 10)
    shape = ["tbf", "rate", f"{bits}bit", "burst", f"{burst}b", "limit", f"{queue}b"]
    execute(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape])
