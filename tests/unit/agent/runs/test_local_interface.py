"""Directory and socket of a run's local interface."""

from __future__ import annotations

from pathlib import Path

from barnraise.agent.runs.local_interface import RunInterface, remove_interfaces


class RecordingListener:
    """The runs that are served, with their directories."""

    def __init__(self) -> None:
        self.served: dict[str, Path] = {}

    def open_run(self, run: str, directory: Path, *, has_secret: bool = True) -> None:
        self.served[run] = directory

    def close_run(self, run: str) -> None:
        del self.served[run]


def test_interface_has_a_private_directory_of_its_own_until_it_closes(tmp_path: Path) -> None:
    listener = RecordingListener()
    first = RunInterface.open(listener, "one-abcd", tmp_path)
    second = RunInterface.open(listener, "two-abcd", tmp_path)
    assert listener.served == {"one-abcd": first.directory, "two-abcd": second.directory}
    assert first.directory != second.directory
    assert first.directory.stat().st_mode & 0o077 == 0
    assert len(str(first.directory)) <= len(str(tmp_path)) + 12, "the path of a local socket is limited"
    (first.directory / "openssl.cnf").touch()
    first.close()
    assert not first.directory.exists()
    assert list(listener.served) == ["two-abcd"]
    remove_interfaces(tmp_path)
    assert not second.directory.exists()
    remove_interfaces(tmp_path)  # there is none
