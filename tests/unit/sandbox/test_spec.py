"""Environment and files of a sandbox."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import barnraise
from barnraise.sandbox.spec import (
    SandboxSpec,
    clean_environment,
    outermost,
    python_roots,
    renamed,
    script_environment,
)

SPEC = SandboxSpec(root="/run/box", directory="/run/folder", writable=("/run/folder",))


def test_clean_environment_leaves_credentials_of_machine_out() -> None:
    machine = {
        "PATH": "/usr/bin",
        "LC_ALL": "C",
        "CUDA_VISIBLE_DEVICES": "0",
        "AWS_SECRET_ACCESS_KEY": "a secret",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/bus",
        "LD_PRELOAD": "/home/me/x.so",
        "HOME": "/home/me",
        "PYTHONPATH": "/home/me/lib",
        "BARNRAISE_STATE_DIRECTORY": "/home/me/state",
    }
    environment = clean_environment(machine, SPEC)
    kept = {"PATH": "/usr/bin", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0"}
    own = {"HOME": "/run/box/home", "TMPDIR": "/tmp", "USER": "barnraise", "LOGNAME": "barnraise"}
    source = environment.pop("PYTHONPATH", None)
    assert source in (None, str(Path(barnraise.__file__).parents[1]))
    assert environment == {**kept, **own}


def test_script_environment_keeps_home_of_sandbox_and_both_module_paths() -> None:
    machine = {"HOME": "/run/box/home", "PYTHONPATH": "/source", "PATH": "/usr/bin"}
    given = {"HOME": "/home/me", "PYTHONPATH": "lib", "PATH": "/opt/bin", "RANK": "0"}
    environment = script_environment(machine | renamed(given))
    paths = os.pathsep.join(("lib", "/source"))
    assert environment == {"HOME": "/run/box/home", "PYTHONPATH": paths, "PATH": "/opt/bin", "RANK": "0"}


def test_outermost_drops_directories_that_contain_a_hidden_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "venv" / "lib").mkdir(parents=True)
    paths = [str(tmp_path), str(home), str(home / "venv"), str(home / "venv" / "lib"), "/"]
    assert outermost(paths, forbidden=[str(home)]) == (str(home / "venv"),)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert outermost([str(link)], forbidden=[str(home)]) == (), "a link to such a directory is one"


def test_python_roots_hold_interpreter_and_package_but_not_working_directory() -> None:
    roots = [Path(root) for root in python_roots(Path(sys.executable))]
    for needed in (Path(sys.executable), Path(barnraise.__file__)):
        assert any(needed.is_relative_to(root) for root in roots)
    assert Path.cwd() not in roots


def test_python_roots_follow_virtual_environment(tmp_path: Path) -> None:
    base, venv = tmp_path / "python", tmp_path / "venv"
    (base / "bin").mkdir(parents=True)
    (venv / "bin").mkdir(parents=True)
    (base / "bin" / "python3").touch()
    (venv / "bin" / "python").symlink_to(base / "bin" / "python3")
    (venv / "pyvenv.cfg").write_text(f"home = {base / 'bin'}\nversion = 3.11.7\n")
    assert {str(base), str(venv)} <= set(python_roots(venv / "bin" / "python"))
