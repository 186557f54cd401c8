"""Access lists of Windows: reads the owner and the list of a path, and says which other users it admits.

The list is read as text in the security descriptor definition language (SDDL), whose rules are pure.
This module has never been run on a real Windows machine.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from barnraise.core.ownership.rules import Refusal

_FILE_OBJECT = 1
_OWNER_AND_LIST = 0x1 | 0x4
_REVISION = 1
_TOKEN_QUERY = 0x8
_TOKEN_USER = 1
_SID_AT = re.compile(r"O:(?P<owner>S-[0-9-]+|[A-Z]{2})")
_ENTRY = re.compile(r"\((?P<kind>[^;()]*);[^;()]*;(?P<rights>[^;()]*);[^;()]*;[^;()]*;(?P<user>[^;()]*)")
# System, administrators, the owner itself, and the two placeholders for it. They can read everything anyway.
_SYSTEM = frozenset({"SY", "BA", "OW", "CO", "S-1-5-18", "S-1-5-32-544", "S-1-3-0", "S-1-3-4"})
_ALLOWS = frozenset({"A", "OA", "XA", "ZA"})


def refuse_access_list(path: str, text: str, user: str, profile: str) -> Refusal | None:
    """Return why other users may read or change a path with this SDDL text; None if they may not.

    ``user``: the security identifier of this user. ``profile``: its own folder, to suggest.
    """
    elsewhere = f"Choose a directory inside {profile} (BARNRAISE_STATE_DIRECTORY)."
    match = _SID_AT.search(text)
    owner = match["owner"] if match is not None else "unknown"
    if owner not in _SYSTEM | {user}:
        return Refusal(f"the directory {path} belongs to another user ({owner})", elsewhere)
    _, listed, entries = text.partition("D:")
    if not listed or "(" not in entries:
        return Refusal(f"the directory {path} has no access list: every user may change it", elsewhere)
    for entry in _ENTRY.finditer(entries):  # entries of an audit list have other kinds
        if entry["kind"] in _ALLOWS and entry["rights"] and entry["user"] not in _SYSTEM | {user}:
            return Refusal(
                f"other users may read or change the directory {path} ({entry['user']})",
                f'{elsewhere} Or run: icacls "{path}" /inheritance:r /grant:r "%USERNAME%:(OI)(CI)F"',
            )
    return None


def read_access_list(path: str) -> tuple[str, str]:
    """Return the SDDL text of a path and the security identifier of this process's user."""
    windll: Any = ctypes.__dict__["windll"]
    advapi, kernel = windll.advapi32, windll.kernel32
    descriptor = ctypes.c_void_p()
    failed = advapi.GetNamedSecurityInfoW(
        ctypes.c_wchar_p(path),
        _FILE_OBJECT,
        _OWNER_AND_LIST,
        None,
        None,
        None,
        None,
        ctypes.byref(descriptor),
    )
    if failed:
        raise OSError(f"Windows cannot read the access list of {path} (error {failed})")
    text = ctypes.c_wchar_p()
    try:
        if not advapi.ConvertSecurityDescriptorToStringSecurityDescriptorW(
            descriptor, _REVISION, _OWNER_AND_LIST, ctypes.byref(text), None
        ):
            raise OSError(f"Windows cannot show the access list of {path}")
        return _taken(kernel, text), _own_identifier(advapi, kernel)
    finally:
        kernel.LocalFree(descriptor)


def _own_identifier(advapi: Any, kernel: Any) -> str:
    token, size = ctypes.c_void_p(), ctypes.c_uint32()
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    process = ctypes.c_void_p(kernel.GetCurrentProcess())
    if not advapi.OpenProcessToken(process, _TOKEN_QUERY, ctypes.byref(token)):
        raise OSError("Windows does not say which user this process belongs to")
    try:
        advapi.GetTokenInformation(token, _TOKEN_USER, None, 0, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        if not advapi.GetTokenInformation(token, _TOKEN_USER, buffer, size, ctypes.byref(size)):
            raise OSError("Windows does not say which user this process belongs to")
        identifier = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_void_p))[0]
        text = ctypes.c_wchar_p()
        if not advapi.ConvertSidToStringSidW(ctypes.c_void_p(identifier), ctypes.byref(text)):
            raise OSError("Windows cannot show the identifier of this user")
        return _taken(kernel, text)
    finally:
        kernel.CloseHandle(token)


def _taken(kernel: Any, text: ctypes.c_wchar_p) -> str:
    """Return a text that Windows allocated, and free it there."""
    value = text.value or ""
    kernel.LocalFree(text)
    return value
