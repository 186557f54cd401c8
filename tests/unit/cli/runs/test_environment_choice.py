"""Before an environment is built from a file in the folder, a person is asked or printed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from barnraise.agent_client.run_options import RunOptions
from barnraise.agent_client.run_requests import GraphResponse
from barnraise.artifacts import ArtifactStore, FolderLimits, FolderManifest, pack
from barnraise.cli.runs import environment_choice
from barnraise.cli.runs.environment_choice import choose_environment


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Folder:
    """A packed folder with one requirement, and a state directory without environments."""

    def __init__(self, path: Path) -> None:
        (path / "mine").mkdir()
        (path / "mine" / "requirements.txt").write_text("numpy\n")
        self.store, self.state = ArtifactStore(path / "store"), path / "state"
        limits = FolderLimits(most_bytes=1 << 20, most_files=10)
        self.manifest: FolderManifest = pack(path / "mine", self.store, limits).manifest

    def choose(self, **options: str) -> str:
        chosen = RunOptions(**options)  # type: ignore[arg-type]
        return choose_environment(self.store, self.manifest, chosen, (), self.state).environment


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_without_a_terminal_the_decision_is_told(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.choose() == "auto"
    printed = " ".join(capsys.readouterr().err.split())
    assert printed == (
        "barnraise: each machine builds an environment from requirements.txt (1 package); "
        "`--env agent` skips it"
    )


@pytest.mark.parametrize(("answer", "environment"), [("\n", "auto"), ("y\n", "auto"), ("n\n", "agent")])
def test_person_at_a_terminal_is_asked(
    answer: str, environment: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", screen)
    graph = GraphResponse(graph=b"", nodes=("a", "b", "c"), this="a")
    monkeypatch.setattr(environment_choice, "ask", lambda *_: graph)
    assert folder.choose() == environment
    assert "Build an environment from requirements.txt on 3 machines? [Y/n]" in screen.getvalue()
    assert "`--env agent`" in screen.getvalue()
    lines = screen.getvalue().replace("[Y/n]: ", "[Y/n]: \n").splitlines()  # a terminal shows the typed line
    assert max(map(len, lines)) <= 80


def test_explicit_choice_is_not_asked_for(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.choose(environment="sync") == "sync"
    assert folder.choose(environment="agent") == "agent"
    assert folder.choose(container="image") == "auto"
    assert capsys.readouterr().err == ""
