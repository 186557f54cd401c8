"""The lab's pure parts: units, and splitting a TCP super-segment around lost packets."""

import pathlib
import random
import struct

import pytest

from lab import units
from lab.forwarder import Path, piece, segments_in
from lab.systems import pe_files
from lab.systems.arm64 import Arm64
from lab.systems.windows import Windows

_MSS = 1448
_HEADERS = 14 + 20 + 32


def _super_segment(payload: bytes, sequence: int = 0xFFFFFF00) -> bytes:
    offload = struct.pack("<BBHHHH", 1, 1, _HEADERS, _MSS, 34, 16)
    ethernet = bytes.fromhex("020000000002020000000001") + b"\x08\x00"
    total = 20 + 32 + len(payload)
    internet = struct.pack(
        ">BBHHHBBH4s4s", 0x45, 0, total, 7, 0x4000, 64, 6, 0, b"\x0a\x50\0\1", b"\x0a\x50\0\2"
    )
    flags = 0x80 | 0x10 | 0x08 | 0x01
    tcp = struct.pack(">HHIIBBHHH", 1000, 2000, sequence, 5, 8 << 4, flags, 512, 0, 0) + bytes(12)
    return offload + ethernet + internet + tcp + payload


def _payload(frame: bytes) -> bytes:
    return frame[10 + _HEADERS :]


def test_units_of_rates_and_delays_are_parsed() -> None:
    assert units.bits_per_second("1gbit") == 10**9
    assert units.bits_per_second("2.5Mbit") == 2_500_000
    assert units.seconds("20ms") == pytest.approx(0.02)
    assert units.seconds("150us") == pytest.approx(150e-6)
    assert units.share("5%") == units.share(0.05) == pytest.approx(0.05)
    for wrong in (lambda: units.bits_per_second("1"), lambda: units.seconds("5"), lambda: units.share(5)):
        with pytest.raises(ValueError):
            wrong()


def test_pieces_of_a_super_segment_are_proper_packets() -> None:
    data = random.Random(1).randbytes(10 * _MSS + 100)
    frame = _super_segment(data)
    assert segments_in(frame) == 11
    parts = [piece(frame, 0, 3), piece(frame, 3, 1), piece(frame, 4, 7)]
    assert b"".join(_payload(part) for part in parts) == data
    for part, first in zip(parts, (0, 3, 4), strict=True):
        internet, tcp = part[24:44], part[44:76]
        total, identification = struct.unpack(">HH", internet[2:6])
        assert (total, identification) == (len(part) - 24, 7 + first)
        words = sum(struct.unpack(">10H", internet))
        assert (words & 0xFFFF) + (words >> 16) == 0xFFFF
        assert struct.unpack(">I", tcp[4:8])[0] == (0xFFFFFF00 + first * _MSS) & 0xFFFFFFFF
        pseudo = sum(struct.unpack(">4H", internet[12:20])) + 6 + total - 20
        assert struct.unpack(">H", tcp[16:18])[0] == (pseudo & 0xFFFF) + (pseudo >> 16)
    assert [part[44 + 13] for part in parts] == [0x90, 0x10, 0x19]
    assert [segments_in(part) for part in parts] == [3, 1, 7]
    assert struct.unpack_from("<BBHH", parts[1])[1::2] == (0, 0)


@pytest.mark.parametrize("loss", [0.01, 0.3, 1.0])
def test_loss_falls_on_single_packets(loss: float) -> None:
    random.seed(5)
    path = Path(0, 0, loss)
    data = b"".join(bytes([number]) * _MSS for number in range(40))
    frame = _super_segment(data)
    kept = 0
    for _ in range(1000):
        parts = path.survivors(frame)
        kept += sum(segments_in(part) for part in parts)
        numbers = b"".join(_payload(part)[::_MSS] for part in parts)
        assert list(numbers) == sorted(set(numbers))
    assert 1 - kept / 40_000 == pytest.approx(loss, rel=0.15)


def test_jitter_keeps_order_and_bounds() -> None:
    path = Path(0.02, 0.005, 0)
    dues = [path.due(now / 10_000) for now in range(1000)]
    assert dues == sorted(dues)
    assert all(-1e-9 <= due - now / 10_000 - 0.015 <= 0.01 + 1e-9 for now, due in enumerate(dues))
    assert all(Path(0.001, 0.005, 0).due(1.0) >= 1.0 for _ in range(100))


def test_forwarder_library_exports_its_functions() -> None:
    names = ["Py_Main", "PyObject_Repr", "_Py_Dealloc"]
    assert pe_files.exported_names(pe_files.forwarder_dll("python3.dll", "python311.dll", names)) == sorted(
        names
    )


def test_python_program_is_a_console_program_of_windows() -> None:
    program = pe_files.python_exe("python311.dll")
    header = int.from_bytes(program[0x3C:0x40], "little")
    assert program[:2] == b"MZ"
    assert program[header : header + 6] == b"PE\0\0\x64\x86"
    assert int.from_bytes(program[header + 24 + 68 : header + 24 + 70], "little") == 3, "a console program"
    assert all(name in program for name in (b"python311.dll", b"Py_Main", b"ExitProcess"))


def test_system_that_is_not_prepared_says_how_to(tmp_path: pathlib.Path) -> None:
    for system in (Windows(tmp_path), Arm64(tmp_path)):
        reason = system.why_unavailable()
        assert reason is not None
        assert reason.endswith(f"Run: python -m lab prepare {system.name}")
