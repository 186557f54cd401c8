"""A group of machines that a script names: listeners, keys and links of two machines on one computer."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import barnraise
from barnraise.core.errors import ConfigError, OperationTimeout, ProtocolError
from barnraise.discovery.static import StaticPeer
from barnraise.identity import NodeKey
from barnraise.worker.init_process_group import exchange_nodes
from benchmarks.hub.process import free_port
from tests.arch.source_tree import ROOT, SOURCE

SECRET, OTHER = b"s" * 32, b"t" * 32
PLACES = [StaticPeer("pc", 52416), StaticPeer("nas", 52500)]

PROGRAM = """
import sys
import torch, torch.distributed as dist
import barnraise
from barnraise import collectives
rank, secret, *peers = sys.argv[1:]
torch.set_num_threads(1)
for _ in range(2):
    barnraise.init_process_group(peers, int(rank), secret_file=secret, timeout=120)
    total = torch.full((1000,), int(rank) + 1.0)
    dist.all_reduce(total)
    links = collectives.statistics()["links"]
    print(dist.get_backend(), dist.get_world_size(), total[9].item(), all("TLS" in link for link in links))
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, because the path of a socket is short."""
    made = Path(tempfile.mkdtemp(prefix="by-p-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def _two_free_ports() -> int:
    """Return a free port whose next one is free, too."""
    for _ in range(50):
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise AssertionError("no two free ports in a row")


def _secret(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


def _run(folder: Path, peers: list[str], secret_files: list[Path]) -> list[tuple[str, str, int]]:
    (folder / "config.toml").touch()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")},
        "BARNRAISE_CONFIG": str(folder / "config.toml"),
        "BARNRAISE_STATE_DIRECTORY": str(folder / "s"),
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(secret_files[rank]), *peers],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(len(peers))
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(*output, process.returncode) for output, process in zip(outputs, processes, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_named_machines_form_an_encrypted_group(folder: Path) -> None:
    """Two ranks on one machine and one on another, twice in the same processes."""
    first, second = _two_free_ports(), free_port()
    peers = [f"127.0.0.1:{port}" for port in (first, first, second)]
    ends = _run(folder, peers, [_secret(folder, "secret")] * 3)
    assert [code for _, _, code in ends] == [0, 0, 0], ends
    assert [out.splitlines() for out, _, _ in ends] == [["barnraise 3 6.0 True"] * 2] * 3
    keys = {path.read_bytes() for path in (folder / "s").glob("peers-*/node.key")}
    assert len(keys) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_machine_with_another_secret_is_named(folder: Path) -> None:
    peers = [f"127.0.0.1:{port}" for port in (_two_free_ports(), free_port())]
    ends = _run(folder, peers, [_secret(folder, "secret"), _secret(folder, "other")])
    for rank, (out, err, code) in enumerate(ends):
        assert (out, code) == ("", 1)
        assert f"rank {1 - rank} has another secret" in err, err


def _exchange(store: dist.Store, rank: int, secret: bytes, places: list[StaticPeer]) -> Any:
    node = NodeKey.generate().id
    return node, exchange_nodes(store, rank, places, secret, node, 60.0)


def test_ranks_learn_the_keys_of_all_machines() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: _exchange(store, rank, SECRET, PLACES), range(2))
    assert first[1] == second[1] == (first[0], second[0])


@pytest.mark.parametrize(
    ("secret", "places"), [(OTHER, PLACES), (SECRET, PLACES[::-1]), (SECRET, [PLACES[0], PLACES[0]])]
)
def test_other_secret_or_peers_are_rejected(secret: bytes, places: list[StaticPeer]) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(_exchange, store, 0, SECRET, PLACES),
            pool.submit(_exchange, store, 1, secret, places),
        ]
        for rank, end in enumerate(ends):
            with pytest.raises(ProtocolError, match=f"rank {1 - rank} has another secret, or other peers"):
                end.result(120)


@pytest.mark.parametrize("entry", [b"", b"x" * 31, b"x" * 64, b"x" * 10_000])
def test_entry_without_proof_is_rejected(entry: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.worker.init_process_group._LINGER_S", 0.01)
    store = dist.HashStore()
    store.set("peer/1", entry)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="rank 1"):
        _exchange(store, 0, SECRET, PLACES)


def test_missing_rank_is_named() -> None:
    node = NodeKey.generate().id
    with pytest.raises(OperationTimeout, match="rank 1 did not call init_process_group"):
        exchange_nodes(dist.HashStore(), 0, PLACES, SECRET, node, 0.3)


@pytest.mark.parametrize(
    ("peers", "rank", "message"),
    [
        ([], 0, "not a list of addresses"),
        ("pc", 0, "not a list of addresses"),
        (["pc", "nas"], 2, "rank 2 is not among 2 peers"),
        (["pc", "nas"], -1, "rank -1 is not among 2 peers"),
        (["pc:0", "nas"], 0, "an address of peers is wrong"),
        (["pc:65535", "nas"], 0, "no port after 65535"),
        (["pc", "nas"], 0, "needs a secret that they share"),
    ],
)
def test_wrong_peers_are_refused(
    peers: list[str], rank: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path / "config.toml"))
    with pytest.raises(ConfigError, match=message):
        barnraise.init_process_group(peers, rank)


def test_processes_of_a_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_LAUNCHED", "1")
    with pytest.raises(ConfigError, match="started by `barnraise run`"):
        barnraise.init_process_group(["pc", "nas"], 0)
