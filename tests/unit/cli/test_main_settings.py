"""Settings of runs, given to an agent and to commands that are typed beside it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from barnraise.artifacts import ArtifactStore, FolderLimits, pack
from barnraise.artifacts.packing.results import store_directory
from tests.unit.cli.typed import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MB = 1 << 20


def test_store_bytes_lets_an_agent_drop_what_was_not_used_for_longest() -> None:
    """Three folders of 400 KB, last used days ago, do not all fit into 1 MiB."""
    with tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=True) as room:
        machine = Machine(Path(room), "box", BARNRAISE_RUNS_STORE_BYTES=str(MB))
        store = ArtifactStore(store_directory(machine.state))
        packs = [_packed(machine.room / f"folder-{days}", store, days) for days in (1, 2, 3)]
        assert _held(store, packs) == [True, True, True]
        with machine.typing("up") as agent:
            agent.until(lambda: _held(store, packs) == [True, True, False], "room in the store")


def test_most_data_bytes_refuses_a_larger_data_set_and_takes_one_that_fits() -> None:
    with tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=True) as room:
        machine = Machine(Path(room), "box", BARNRAISE_RUNS_MOST_DATA_BYTES="1000")
        project, data = machine.room / "project", machine.room / "data"
        for folder in (project, data):
            folder.mkdir()
        (project / "line.py").write_text("import os; print(os.listdir(os.environ['BARNRAISE_DATA_SET']))")
        words = ("run", "--env", "agent", "--per-node", "1", "--folder", str(project))
        words += ("--data", f"set={data}", str(project / "line.py"))
        with machine.typing("up") as agent:
            agent.until(lambda: (machine.state / "store").exists(), "the agent")
            (data / "large").write_bytes(bytes(1001))
            output = machine.type(*words, code=1)
            assert "1000 B" in output or "1,000" in output, output
            (data / "large").write_bytes(bytes(1000))
            assert "['large']" in machine.type(*words)


def _packed(folder: Path, store: ArtifactStore, days: float) -> bytes:
    """Pack a folder that was last used this many days ago, and return the id of its manifest."""
    folder.mkdir()
    (folder / "content").write_bytes(os.urandom(400_000))
    name = pack(folder, store, FolderLimits(most_bytes=MB, most_files=10)).id
    manifest = store.manifest(name)
    assert manifest is not None
    used = time.time() - days * 86400
    os.utime(store.manifests / name.hex(), (used, used))
    for key in manifest.objects():
        os.utime(store.object_path(key), (used, used))
    return name


def _held(store: ArtifactStore, packs: list[bytes]) -> list[bool]:
    return [(store.manifests / name.hex()).exists() for name in packs]
