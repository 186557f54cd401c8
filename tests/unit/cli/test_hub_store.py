"""`barnraise hub up --store` and `barnraise join`, typed: what a friend trains with comes from the bucket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barnraise.hub.storage.log import HubLog
from benchmarks.hub.process import free_port
from tests.arch.source_tree import ROOT
from tests.unit.hub.s3_server import BUCKET, ENVIRONMENT, S3Process, until


@contextmanager
def typed(room: Path, *words: str) -> Iterator[Path]:
    """A command on a machine of its own; the file with all that it says. Ctrl-C at the end."""
    room.mkdir()
    output = room / "said"
    environment = os.environ | {
        "BARNRAISE_STATE_DIRECTORY": str(room / "state"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "barnraise.cli.main", *words],
            cwd=room,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield output
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(90)
        finally:
            process.kill()
            print(output.read_text(errors="replace")[-3000:])


def deltas(hub: Path) -> set[str]:
    log = HubLog(hub)
    try:
        return {version.step.sha256 for version in log.read().versions if version.step.kind == "delta"}
    finally:
        log.close()


def taken(s3: S3Process) -> set[str]:
    return {path.rpartition("/")[2] for path, _ in s3.fetched()}


@pytest.mark.slow
def test_member_trains_with_blobs_of_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "s3").mkdir()
    s3, port = S3Process(tmp_path / "s3"), free_port()
    hub = ["hub", "up", "--plain", "--port", str(port), "--address", f"http://127.0.0.1:{port}"]
    hub += ["--round", "2s", "--store", f"s3://{BUCKET}", "--store-endpoint", s3.endpoint]
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "friends.py").write_text((ROOT / "examples" / "friends.py").read_text())
    try:
        s3.reset()
        with typed(tmp_path / "host", *hub, "--folder", str(folder), str(folder / "friends.py")) as host:
            until(lambda: "--invite barnraise-invite:" in host.read_text(), "the hub", 90.0)
            invite = re.search(r"barnraise-invite:\S+", host.read_text())
            assert invite is not None
            until(lambda: len(s3.names()) >= 4, "the hub, which puts code, base and a delta there")
            assert s3.fetched() == [], "the hub's own machine needs no store"
            with typed(tmp_path / "friend", "join", "--yes", "--invite", invite[0]) as friend:
                until(lambda: "this machine is" in friend.read_text(), "the friend", 90.0)
                assert f"may also come from {s3.endpoint}," in friend.read_text()
                chain = tmp_path / "host" / "state" / "hub" / "friends"
                names = lambda: {path.rpartition("/")[2] for path, _ in s3.fetched()}  # noqa: E731
                until(
                    lambda: bool(names() & deltas(chain)), "the friend's script, which fetches a delta", 90.0
                )
    finally:
        s3.kill()
