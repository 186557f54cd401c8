"""Writes two small Windows programs without a compiler: ``python.exe`` and ``python3.dll``.

`python.exe` calls ``Py_Main`` of a Python library. `python3.dll` has the stable ABI: it forwards each
function to that library. Both are files in the PE format with one section. Pure.
"""

import struct
from collections.abc import Sequence

_SECTION = 0x1000  # where the section is in memory
_HEADERS = 0x200  # where it is in the file
_EXE_BASE, _DLL_BASE = 0x140000000, 0x180000000
_CODE = 0x100
_EXPORTS, _IMPORTS = 0, 1  # places in the table of directories


class _Body:
    """The bytes of the section, and the address at which each part will be in memory."""

    def __init__(self, reserved: int = 0) -> None:
        self.data = bytearray(reserved)

    def add(self, part: bytes, align: int = 1) -> int:
        self.data.extend(bytes(-len(self.data) % align))
        self.data.extend(part)
        return _SECTION + len(self.data) - len(part)


def python_exe(library: str) -> bytes:
    """Return a console program that passes its command line to ``Py_Main`` of the library."""
    body = _Body(_CODE)
    slots: dict[str, int] = {}
    entries = b""
    for dll, function in (
        ("msvcrt.dll", "__wgetmainargs"),
        (library, "Py_Main"),
        ("KERNEL32.dll", "ExitProcess"),
    ):
        hint = body.add(b"\0\0" + function.encode() + b"\0", 2)
        table = struct.pack("<QQ", hint, 0)
        lookup, slots[function] = body.add(table, 8), body.add(table, 8)
        entries += struct.pack("<IIIII", lookup, 0, 0, body.add(dll.encode() + b"\0"), slots[function])
    entries += bytes(20)
    directory = body.add(entries, 16)
    argc, argv, environment, info = (body.add(bytes(8), 8) for _ in range(4))
    body.data[:_CODE] = _main_code(slots, argc, argv, environment, info).ljust(_CODE, b"\xcc")
    return _pe_file(body, {_IMPORTS: (directory, len(entries))}, base=_EXE_BASE, is_dll=False)


def _main_code(slots: dict[str, int], argc: int, argv: int, environment: int, info: int) -> bytes:
    """Return the machine code: ``ExitProcess(Py_Main(argc, argv))``."""
    code = bytearray(b"\x48\x83\xec\x48")  # sub rsp, 0x48

    def relative(instruction: bytes, address: int) -> None:
        code.extend(instruction)
        code.extend(struct.pack("<i", address - (_SECTION + len(code) + 4)))

    relative(b"\x48\x8d\x0d", argc)  # lea rcx, [argc]
    relative(b"\x48\x8d\x15", argv)  # lea rdx, [argv]
    relative(b"\x4c\x8d\x05", environment)  # lea r8, [environment]
    code.extend(b"\x45\x31\xc9")  # xor r9d, r9d
    relative(b"\x48\x8d\x05", info)  # lea rax, [info]
    code.extend(b"\x48\x89\x44\x24\x20")  # mov [rsp + 0x20], rax
    relative(b"\xff\x15", slots["__wgetmainargs"])  # call
    relative(b"\x8b\x0d", argc)  # mov ecx, [argc]
    relative(b"\x48\x8b\x15", argv)  # mov rdx, [argv]
    relative(b"\xff\x15", slots["Py_Main"])  # call
    code.extend(b"\x89\xc1")  # mov ecx, eax
    relative(b"\xff\x15", slots["ExitProcess"])  # call
    return bytes(code)


def forwarder_dll(name: str, library: str, functions: Sequence[str]) -> bytes:
    """Return a library that forwards these functions to another one."""
    ordered = sorted(functions)
    count = len(ordered)
    body = _Body(40 + 10 * count)  # the directory, and its three tables
    own = body.add(name.encode() + b"\0")
    names = [body.add(function.encode() + b"\0") for function in ordered]
    stem = library.rpartition(".")[0]
    targets = [body.add(f"{stem}.{function}".encode() + b"\0") for function in ordered]
    tables = [_SECTION + 40, _SECTION + 40 + 4 * count, _SECTION + 40 + 8 * count]
    head = struct.pack("<IIHHIIIIIII", 0, 0, 0, 0, own, 1, count, count, *tables)
    head += struct.pack(f"<{count}I{count}I{count}H", *targets, *names, *range(count))
    body.data[: len(head)] = head
    return _pe_file(body, {_EXPORTS: (_SECTION, len(body.data))}, base=_DLL_BASE, is_dll=True)


def _pe_file(body: _Body, directories: dict[int, tuple[int, int]], *, base: int, is_dll: bool) -> bytes:
    size = len(body.data)
    raw = -(-size // 0x200) * 0x200
    image = _SECTION + -(-size // 0x1000) * 0x1000
    kind = 0x2022 if is_dll else 0x0023  # large addresses; a program is not relocated
    console, windows_gui = 3, 2
    subsystem = windows_gui if is_dll else console
    flags = 0x0160 if is_dll else 0x8100
    dos = b"MZ" + bytes(58) + struct.pack("<I", 64)
    coff = b"PE\0\0" + struct.pack("<HHIIIHH", 0x8664, 1, 0, 0, 0, 240, kind)
    optional = struct.pack("<HBBIIIII", 0x20B, 14, 0, raw, 0, 0, 0 if is_dll else _SECTION, _SECTION)
    optional += struct.pack(
        "<QIIHHHHHHIIIIHH",
        base, 0x1000, 0x200, 6, 2, 0, 0, 6, 2, 0, image, _HEADERS, 0, subsystem, flags,
    )  # fmt: skip
    optional += struct.pack("<QQQQII", 0x400000, 0x10000, 0x100000, 0x1000, 0, 16)
    for number in range(16):
        optional += struct.pack("<II", *directories.get(number, (0, 0)))
    access = 0x40000040 if is_dll else 0xE0000060  # data; or code and data that may be written
    section = b".all\0\0\0\0" + struct.pack("<IIIIIIHHI", size, _SECTION, raw, _HEADERS, 0, 0, 0, 0, access)
    return (dos + coff + optional + section).ljust(_HEADERS, b"\0") + bytes(body.data).ljust(raw, b"\0")


def exported_names(library: bytes) -> list[str]:
    """Return the names that a 64-bit library exports."""
    header = int.from_bytes(library[0x3C:0x40], "little")
    count, optional_size = struct.unpack_from("<H12xH", library, header + 6)
    optional = header + 24
    exports = int.from_bytes(library[optional + 112 : optional + 116], "little")
    sections = [
        struct.unpack_from("<IIII", library, optional + optional_size + 40 * number + 8)
        for number in range(count)
    ]

    def offset(address: int) -> int:
        for size, start, raw_size, raw in sections:
            if start <= address < start + max(size, raw_size):
                return int(address - start + raw)
        raise ValueError(f"address {address:#x} is in no section")

    at = offset(exports)
    names, table = (
        struct.unpack_from("<I", library, at + 24)[0],
        struct.unpack_from("<I", library, at + 32)[0],
    )
    exported = []
    for number in range(names):
        start = offset(struct.unpack_from("<I", library, offset(table) + 4 * number)[0])
        exported.append(library[start : library.index(b"\0", start)].decode())
    return exported
