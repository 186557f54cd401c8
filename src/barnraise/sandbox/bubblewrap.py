"""The sandbox of Linux: a command line for bubblewrap, with the system paths that every script sees. Pure.

The script gets namespaces of its own for users, processes, network, shared memory and host name, no
capabilities and no new privileges. It sees the system's programs and libraries read-only, and of everything
else only what its `SandboxSpec` names. Its network has only a loopback interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from barnraise.sandbox.spec import SandboxSpec, outermost

PROGRAM = "bwrap"
# Programs, libraries and drivers. Only parts of /etc are shown: root could read all of it.
_SYSTEM = ("/usr", "/opt", "/nix/store", "/gnu/store", "/run/opengl-driver", "/sys/devices/system")
_ETC = (
    "alternatives",
    "ca-certificates",
    "crypto-policies",
    "fonts",
    "group",
    "hosts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "OpenCL",
    "passwd",
    "pki",
    "protocols",
    "services",
    "ssl",
    "timezone",
)
_DISABLES_USERNS = (0, 8)  # the first version that can keep a script from making namespaces
_LINKED = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")  # on most systems links into /usr
_GPUS = ("/dev/nvidia", "/dev/dri", "/dev/kfd", "/dev/dxg")
_GPU_FACTS = ("/sys/bus", "/sys/class", "/sys/dev", "/sys/devices", "/sys/module")
# SIGTERM goes to the whole process group. bwrap would end at once, and the script with it.
_KEEP_ON_SIGTERM = 'trap "" TERM INT; exec "$@"'


def bubblewrap_command(
    program: str,
    spec: SandboxSpec,
    command: Sequence[str],
    *,
    version: tuple[int, ...] = (),
    devices: Sequence[str] = (),
    link_of: Callable[[str], str | None] = lambda name: f"usr/{name}",
) -> tuple[str, ...]:
    """Return the command line that runs ``command`` in a sandbox.

    ``devices``: device files of GPUs. ``link_of`` returns the target of a link such as /lib; None if it is a
    directory.
    """
    arguments = [
        *(("--disable-userns",) if version >= _DISABLES_USERNS else ()),
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--cap-drop", "ALL", "--hostname", "sandbox"),
        *("--die-with-parent", "--as-pid-1", "--proc", "/proc", "--dev", "/dev"),
    ]
    for path in (*_SYSTEM, *(f"/etc/{name}" for name in _ETC)):
        arguments += ["--ro-bind-try", path, path]
    for name in _LINKED:
        target = link_of(name)
        if target is None:
            arguments += ["--ro-bind-try", f"/{name}", f"/{name}"]
        else:
            arguments += ["--symlink", target, f"/{name}"]
    for path in devices:
        arguments += ["--dev-bind-try", path, path]
    for path in _GPU_FACTS if devices else ():
        arguments += ["--ro-bind-try", path, path]
    arguments += ["--bind", spec.temporary, "/tmp"]
    for path in spec.hidden:
        arguments += ["--tmpfs", path]
    for path in outermost(spec.readable, forbidden=spec.hidden):
        if not path.startswith("/usr/"):
            arguments += ["--ro-bind", path, path]
    for path in (*spec.writable, spec.home):
        arguments += ["--bind", path, path]
    for path in spec.protected:
        arguments += ["--ro-bind-try", path, path]
    arguments += ["--chdir", spec.directory, "--", *command]
    return ("/bin/sh", "-c", _KEEP_ON_SIGTERM, "sh", program, *arguments)


def gpu_devices(names: Sequence[str]) -> tuple[str, ...]:
    """Return the device files of GPUs among the files of /dev."""
    return tuple(path for path in sorted(names) if path.startswith(_GPUS))
