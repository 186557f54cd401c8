from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from collections.abc import Callable

import pytest

from barnraise.cli.machine import torch_install
from barnraise.cli.machine.torch_install import InstallAdvice, TorchProbe, advise, probe
from barnraise.core.errors import TorchMissing
from barnraise.core.installation import is_tested
from barnraise.environments.torch_build import choose_torch


@pytest.mark.parametrize(
    ("system", "machine", "nvidia", "amd", "index"),
    [
        ("Windows", "AMD64", True, False, "cu130"),
        ("Windows", "AMD64", False, False, "cpu"),
        ("Windows", "AMD64", False, True, "cpu"),
        ("Windows", "ARM64", True, False, "cpu"),
        ("Linux", "x86_64", True, False, "cu130"),
        ("Linux", "aarch64", True, False, "cu130"),
        ("Linux", "x86_64", False, True, "rocm7.2"),
        ("Linux", "x86_64", False, False, "cpu"),
        ("Darwin", "arm64", False, False, None),
    ],
)
def test_install_command_fits_the_machine(
    system: str, machine: str, nvidia: bool, amd: bool, index: str | None
) -> None:
    command = advise(choose_torch(system, machine, nvidia=nvidia, amd=amd)).command
    assert command is not None
    assert '"torch>=2.13,<2.16"' in command
    assert command.replace('"', "").startswith(f"{sys.executable} -m pip install ")
    if index is None:
        assert "--index-url" not in command
    else:
        assert command.endswith(f"--index-url https://download.pytorch.org/whl/{index}")


def test_intel_mac_gets_no_install_command() -> None:
    advice = advise(choose_torch("Darwin", "x86_64", nvidia=False, amd=False))
    assert advice.command is None
    assert "Intel" in advice.why


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.13.0", True),
        ("2.13.1+cu130", True),
        ("2.12.1", False),
        ("2.14.1", True),
        ("2.15.0+cu130", True),
        ("2.16.0", False),
        ("3.0", False),
        ("x", False),
    ],
)
def test_tested_range_accepts_its_versions_only(version: str, tested: bool) -> None:
    assert is_tested(version) is tested


def ending(returncode: int, out: str, err: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], returncode, out, err)

    return run


def test_crashing_torch_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", ending(-11, "", ""))
    assert probe() == "importing it failed: the process ended with -11"
    monkeypatch.setattr(subprocess, "run", ending(1, "", "Traceback\nOSError: a DLL is missing"))
    assert probe() == "importing it failed: OSError: a DLL is missing"


def test_hanging_torch_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(subprocess, "run", run)
    result = probe()
    assert isinstance(result, str)
    assert "took more than" in result


@pytest.mark.parametrize(("version", "code"), [("2.15.0+cpu", 0), ("2.16.0", 1)])
def test_report_shows_command_and_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str, code: int
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch_install, "probe", lambda: TorchProbe(version, ("cpu", "mps"), True))
    assert torch_install.run(install=False, yes=False) == code
    out = capsys.readouterr().out
    assert f"torch {version} ({'tested' if code == 0 else 'NOT tested'}" in out
    assert "devices:   cpu, mps" in out


def test_report_without_torch_shows_next_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_install.run(install=False, yes=False) == 0
    out = capsys.readouterr().out
    assert "no torch" in out
    assert "barnraise torch --install" in out


def _advised(monkeypatch: pytest.MonkeyPatch, program: str | None) -> None:
    """Let a program stand in for pip: it gets pip's options, too."""
    arguments = None if program is None else (sys.executable, "-c", program)
    monkeypatch.setattr(torch_install, "advise", lambda choice: InstallAdvice(arguments, "it fits"))
    monkeypatch.setattr(torch_install, "probe", lambda: TorchProbe("2.13.0+cpu", ("cpu",), True))


def test_install_runs_shown_command_and_reports_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _advised(monkeypatch, "print('unpacking', 3)")
    assert torch_install.run(install=True, yes=True) == 0
    out = capsys.readouterr().out
    assert (
        out.index("print('unpacking', 3)") < out.index("unpacking 3") < out.index("torch 2.13.0+cpu (tested)")
    )
    assert max(map(len, out.splitlines())) <= 80


def test_install_that_fails_shows_output_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    _advised(monkeypatch, "print('no space left'); raise SystemExit(2)")
    with pytest.raises(TorchMissing, match=r"pip ended with code 2[^$]*no space left"):
        torch_install.run(install=True, yes=True)


def test_install_without_terminal_needs_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    _advised(monkeypatch, "raise SystemExit('it ran')")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(TorchMissing, match="asks first") as caught:
        torch_install.run(install=True, yes=False)
    assert "--yes" in caught.value.hint


def test_install_on_machine_without_wheel_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    _advised(monkeypatch, None)
    with pytest.raises(TorchMissing, match="cannot be installed"):
        torch_install.run(install=True, yes=True)


def test_offer_without_terminal_names_command_and_installs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _advised(monkeypatch, "raise SystemExit('it ran')")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(torch_install, "_is_installed", lambda: False)
    assert torch_install.offer_torch(yes=False) == 0
    assert "barnraise torch --install" in capsys.readouterr().out


def test_offer_with_torch_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_install, "_is_installed", lambda: True)
    assert torch_install.offer_torch(yes=True) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_installed_torch_answers_probe() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    result = probe()
    assert isinstance(result, TorchProbe), result
    assert "cpu" in result.devices
