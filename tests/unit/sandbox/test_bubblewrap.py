"""Command line of the sandbox of Linux."""

from __future__ import annotations

from barnraise.sandbox.bubblewrap import bubblewrap_command, gpu_devices
from barnraise.sandbox.spec import SandboxSpec

SPEC = SandboxSpec(
    root="/home/me/state/runs/r/sandbox",
    directory="/home/me/state/runs/r/folder",
    writable=("/home/me/state/runs/r/folder", "/home/me/state/ipc/ab12cd"),
    readable=("/home/me/venv", "/usr/lib/python3", "/data/mnist", "/home"),
    hidden=("/home/me", "/home/me/state"),
)


def pairs(command: tuple[str, ...], option: str) -> list[tuple[str, str]]:
    return [(command[place + 1], command[place + 2]) for place, word in enumerate(command) if word == option]


def test_bubblewrap_command_has_own_namespaces_and_no_capabilities() -> None:
    command = bubblewrap_command("/usr/bin/bwrap", SPEC, ("python", "train.py"), version=(0, 8, 0))
    assert command[:5] == ("/bin/sh", "-c", 'trap "" TERM INT; exec "$@"', "sh", "/usr/bin/bwrap")
    wanted = {"--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent"}
    assert wanted | {"--disable-userns"} <= set(command)
    assert command[command.index("--cap-drop") + 1] == "ALL"
    assert command[-5:] == ("--chdir", SPEC.directory, "--", "python", "train.py")
    older = bubblewrap_command("bwrap", SPEC, ("python",), version=(0, 6, 1))
    assert "--disable-userns" not in older, "it does not know that option"


def test_bubblewrap_command_changes_only_the_run() -> None:
    command = bubblewrap_command("bwrap", SPEC, ("python",))
    root = SPEC.root
    assert pairs(command, "--bind") == [
        (f"{root}/tmp", "/tmp"),
        (SPEC.directory, SPEC.directory),
        ("/home/me/state/ipc/ab12cd", "/home/me/state/ipc/ab12cd"),
        (f"{root}/home", f"{root}/home"),
    ]
    assert pairs(command, "--ro-bind") == [("/home/me/venv",) * 2, ("/data/mnist",) * 2]
    shown = {path for path, _ in pairs(command, "--ro-bind-try")}
    assert not {"/", "/home", "/root", "/var", "/run", "/etc", "/tmp", "/sys", "/proc", "/dev"} & shown
    assert command.index("/home/me/venv") > command.index("--tmpfs"), "else the home would cover it"


def test_bubblewrap_command_protects_parts_of_writable_directories() -> None:
    spec = SandboxSpec(root="/r", directory="/r", writable=("/r",), protected=("/r/logs",))
    command = bubblewrap_command("bwrap", spec, ("python",))
    places = [place for place, word in enumerate(command) if word == "/r/logs"]
    assert command[places[0] - 1] == "--ro-bind-try"
    assert places[0] > command.index("/r")


def test_bubblewrap_command_shows_gpus_and_their_facts_only_if_there_are_some() -> None:
    names = ["/dev/sda", "/dev/nvidia0", "/dev/nvidia-uvm", "/dev/mem", "/dev/dri", "/dev/kfd"]
    devices = gpu_devices(names)
    assert devices == ("/dev/dri", "/dev/kfd", "/dev/nvidia-uvm", "/dev/nvidia0")
    command = bubblewrap_command("bwrap", SPEC, ("python",), devices=devices)
    assert [path for path, _ in pairs(command, "--dev-bind-try")] == list(devices)
    assert ("/sys/class",) * 2 in pairs(command, "--ro-bind-try")
    plain = bubblewrap_command("bwrap", SPEC, ("python",))
    assert ("/sys/class",) * 2 not in pairs(plain, "--ro-bind-try")


def test_bubblewrap_command_keeps_links_of_system_directories() -> None:
    command = bubblewrap_command("bwrap", SPEC, ("python",), link_of={"lib": "usr/lib"}.get)
    assert pairs(command, "--symlink") == [("usr/lib", "/lib")]
    assert ("/bin",) * 2 in pairs(command, "--ro-bind-try")
