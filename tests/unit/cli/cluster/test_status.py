"""`status` and `nodes` with long names on a terminal of 80 columns."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from barnraise.agent_client.cluster_requests import DeviceRow, DiskUse, NodeRow, StatusResponse
from barnraise.cli.cluster import status

ID = "-".join(["1EF2"] * 14)
CPU = DeviceRow("cpu", "AMD Ryzen Threadripper PRO 5995WX 64-Cores", 512 << 30, 2.5)
CARD = DeviceRow("cuda", "NVIDIA GeForce RTX 4090", 24 << 30, 61.0)


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def machine(name: str, **facts: object) -> NodeRow:
    row = NodeRow(
        node=ID, short=ID[:9], name=name, role="owner", state="here", seniority=2, address="10.80.0.2",
        rtt_ms=0.8651, mbps=958.2, os="linux x86_64", python="3.11.7", torch="2.13.0", version="0.1.0",
        devices=(CPU,),
    )  # fmt: skip
    return replace(row, **facts)


def cluster(*rows: NodeRow, sentence: str = "all machines are online") -> StatusResponse:
    return StatusResponse(
        cluster="cf37df20", branch=0, view=5, member=True, decides=True, sentence=sentence,
        coordinator=rows[0].name, why_coordinator="the first", nodes=rows, links=(), port=1, pid=1,
        encryption="tls", version="0.1.0",
    )  # fmt: skip


def test_status_with_long_names_fits_eighty_columns() -> None:
    rows = [
        machine("the-gaming-computer-in-the-attic-" + "x" * 30, runs=("train-8f3z", "train-k2m4")),
        machine("nas", address="2001:0db8:85a3:0000:0000:8a2e:0370:7334", devices=(CARD, CARD, CPU)),
        machine("old", state="silent", role="guest", works=False, devices=()),
    ]
    text = status.describe(cluster(*rows, sentence="; ".join(row.name for row in rows)))
    assert max(map(len, text.splitlines())) <= 80


def test_status_shows_which_machines_are_busy() -> None:
    rows = (
        machine("pc", runs=("train-8f3z",)),
        machine("mac", state="this", coordinator=True, devices=()),
        machine("nas", state="away", role="guest", seniority=None, devices=(CARD, CARD, CPU)),
    )
    pc, mac, nas = status.describe(cluster(*rows)).splitlines()[-3:]
    assert pc.split()[:7] == ["2", "pc", "online", "10.80.0.2", "0.865", "958", "train-8f3z"]
    assert mac.split()[-2:] == ["free", "-"]
    assert "away, guest" in nas
    assert nas.endswith("2x RTX 4090 24 GiB")


@pytest.mark.parametrize(
    ("disk", "shown"),
    [
        (DiskUse(4096, 8192, 0), ["disk: Barnraise uses 12 KiB"]),
        (DiskUse(3 << 20, 0, 0), ["disk: Barnraise uses 3 MiB (runs 3 MiB)"]),
        (
            DiskUse(3 << 30, 9 << 29, 200 << 20),
            [
                "disk: Barnraise uses 7.7 GiB (runs 3 GiB, files 4.5 GiB, environments 200 MiB)",
                "To free space: barnraise clean",
            ],
        ),
    ],
)
def test_status_shows_disk_use_and_how_to_free_much(disk: DiskUse, shown: list[str]) -> None:
    text = status.describe(replace(cluster(machine("pc")), disk=disk))
    assert text.splitlines()[-len(shown) :] == shown
    assert "disk" not in status.describe(cluster(machine("pc")))


def test_nodes_show_whole_ids_in_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (machine("a" * 63, devices=(CPU, CARD)), machine("nas", devices=(), os=""))
    monkeypatch.setattr(status, "ask", lambda question, expected: cluster(*rows))
    assert status.nodes(as_json=False) == 0
    text = capsys.readouterr().out
    assert text.count(ID) == 2
    assert "NVIDIA GeForce RTX 4090 (cuda), 24 GiB, 61 TFLOP/s" in text
    assert max(map(len, text.splitlines())) <= 80


def test_status_and_nodes_print_no_terminal_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest's system, device and name hold commands; also an agent that passed them on is no way in."""
    hostile = "x\x1b]52;c;eA==\x07\x9b2J\u202e\ny"
    row = machine(hostile, os=hostile, python=hostile, torch=hostile, version=hostile, address=hostile)
    row = replace(row, devices=(DeviceRow("cpu", hostile, 1 << 30),), runs=(hostile,))
    response = cluster(row, sentence=hostile)
    monkeypatch.setattr(status, "ask", lambda *_: response)
    status.nodes(as_json=False)
    status.nodes(as_json=True)
    shown = status.describe(response) + capsys.readouterr().out
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\u202e"}
