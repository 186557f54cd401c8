from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from barnraise import __version__
from barnraise.cli.main import main
from barnraise.core.config import Settings
from barnraise.core.errors import ListenerError


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["barnraise", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    code = caught.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, bool]]:
    """A stand-in for the listener that notes how it was called."""
    calls: list[tuple[Settings, bool]] = []

    def serve(settings: Settings, *, until_idle: bool = False) -> int:
        calls.append((settings, until_idle))
        return 0

    monkeypatch.setattr("barnraise.cli.cluster.listen.serve", serve)
    return calls


def test_version_is_printed_by_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"barnraise {__version__}\n"


def test_settings_print_valid_toml_with_origins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BARNRAISE_NETWORK_PORT", "6000")
    monkeypatch.setenv("BARNRAISE_TRUST_NODES", 'a,b"c\\d')
    assert run(monkeypatch, "settings") == 0
    out = capsys.readouterr().out
    assert "port = 6000  # from $BARNRAISE_NETWORK_PORT" in out
    assert "links: encrypted" in out
    state = Path(os.environ["BARNRAISE_STATE_DIRECTORY"])
    assert f"# state directory (this machine's key, cluster and logs): {state}\n" in out
    assert f"# runs: {state / 'runs'}\n" in out
    shown = tomllib.loads(out)
    assert shown["network"]["port"] == 6000
    assert shown["trust"]["nodes"] == ["a", 'b"c\\d']


def test_letters_that_the_encoding_of_a_file_lacks_are_replaced(tmp_path: Path) -> None:
    """The encoding of a file is the code page on Windows."""
    variables = {"PYTHONIOENCODING": "cp1252", "BARNRAISE_STATE_DIRECTORY": str(tmp_path / "Łukasz")}
    words = [sys.executable, "-m", "barnraise.cli.main", "settings"]
    file = tmp_path / "settings.toml"
    with file.open("wb") as out:
        done = subprocess.run(
            words, env=os.environ | variables, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "?ukasz") in file.read_text(encoding="cp1252")


def test_plaintext_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listener: list[tuple[Settings, bool]],
) -> None:
    monkeypatch.setenv("BARNRAISE_NETWORK_ENCRYPTION", "plaintext")
    assert run(monkeypatch, "settings") == 0
    assert "PLAINTEXT" in capsys.readouterr().out
    assert run(monkeypatch, "listen") == 0
    assert "PLAINTEXT" in capsys.readouterr().err


def test_error_is_printed_as_sentence_and_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BARNRAISE_NETWORK_PORT", "many")
    assert run(monkeypatch, "settings") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "[config] network.port" in shown.err
    assert "  -> " in shown.err
    assert "Traceback" not in shown.err


def test_unknown_option_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "listen", "--prot", "1") == 2
    assert run(monkeypatch, "dance") == 2


def test_listen_passes_its_options_on(
    monkeypatch: pytest.MonkeyPatch, listener: list[tuple[Settings, bool]]
) -> None:
    monkeypatch.setenv("BARNRAISE_TRUST_NODES", "from-the-environment")
    assert run(monkeypatch, "listen", "--port", "6001", "--trust", "a", "--trust", "b", "--until-idle") == 0
    assert run(monkeypatch, "listen") == 0
    (given, until_idle), (plain, plain_until_idle) = listener
    assert (given.network.port, given.trust.nodes, until_idle) == (6001, ("a", "b"), True)
    assert (plain.network.port, plain.trust.nodes, plain_until_idle) == (
        52416,
        ("from-the-environment",),
        False,
    )


def test_listen_refuses_an_impossible_port(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listener: list[tuple[Settings, bool]],
) -> None:
    assert run(monkeypatch, "listen", "--port", "70000") == 1
    assert "network.port (argument)" in capsys.readouterr().err
    assert listener == []


def test_failing_listener_prints_its_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listener: list[tuple[Settings, bool]],
) -> None:
    def serve(settings: Settings, *, until_idle: bool = False) -> int:
        raise ListenerError(f"port {settings.network.port} is taken")

    monkeypatch.setattr("barnraise.cli.cluster.listen.serve", serve)
    assert run(monkeypatch, "listen") == 1
    assert "[listener] port 52416 is taken" in capsys.readouterr().err


def test_ctrl_c_ends_the_listener_quietly(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listener: list[tuple[Settings, bool]],
) -> None:
    def serve(settings: Settings, *, until_idle: bool = False) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("barnraise.cli.cluster.listen.serve", serve)
    assert run(monkeypatch, "listen") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_id_is_the_same_every_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path / "state"))
    assert run(monkeypatch, "id") == 0
    first = capsys.readouterr().out
    assert run(monkeypatch, "id") == 0
    assert capsys.readouterr().out == first
    assert len(first.split()) == 1
    assert (tmp_path / "state" / "node.key").exists()
