"""Directory and socket of a run's local interface."""

from __future__ import annotations

from pathlib import Path

from barnraise.agent.runs.local_interface import RunInterface, remove_interfaces


class RecordingListener:
    """The runs that are served, with their directories."""

    def __init__(self) -> None:
        self.served: dict[str, Path] = {}

    def open_run(self, run: str, directory: Path) -> None:
        self.served[run] = directory

    def close_run(self, run: str) -> None:
        del self.served[run]


def test_interface_has_a_private_directory_of_its_own_until_it_closes(tmp_path: Path) -> None:
    listener = RecordingListener()
    one = RunInterface.open(listener, "one-abcd", tmp_path)
    two = RunInterface.open(listener, "two-abcd", tmp_path)
    assert listener.served == {"one-abcd": one.directory, "two-abcd": two.directory}
    assert one.directory != two.directory
    assert one.directory.stat().st_mode & 0o077 == 0
    assert len(str(one.directory)) <= len(str(tmp_path)) + 12, "the path of a local socket is limited"
    (one.directory / "openssl.cnf").touch()
    one.close()
    assert not one.directory.exists()
    assert list(listener.served) == ["two-abcd"]
    remove_interfaces(tmp_path)
    assert not two.directory.exists()
    remove_interfaces(tmp_path)  # there is none
