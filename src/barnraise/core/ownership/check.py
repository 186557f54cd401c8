"""Reads owners and modes from the file system and raises IdentityError for what another user can change.

Unix: the directory is ours and no other user may write to it. The same holds for its parents, up to the home
directory or the root, as ssh checks them. Windows: the directory is inside the user's profile, or its access
list admits no other user.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from barnraise.core.errors import IdentityError
from barnraise.core.ownership.rules import PathFacts, Refusal, refuse_directory, refuse_file


def home_directory() -> Path:
    """Return the user's home directory, which hints suggest; "~" if the system does not know it."""
    return Path(os.path.expanduser("~"))


def check_directory(path: Path) -> None:
    """Raise IdentityError if another user can change this directory or replace it."""
    try:
        refusal = _refuse(path)
    except OSError as error:
        raise IdentityError(
            f"the owner of {path} cannot be read: {error}",
            hint=f"Choose a directory inside {home_directory()}.",
        ) from error
    _raise(refusal)


def check_file(path: Path, status: os.stat_result, *, is_secret: bool) -> None:
    """Raise IdentityError if another user can change this file, or read it if it is a secret.

    On Windows its directory decides about that.
    """
    if sys.platform == "win32":
        if not stat.S_ISREG(status.st_mode):
            raise IdentityError(f"{path} is not a file", hint="Move it away; a new one will be created.")
    else:
        _raise(refuse_file(_facts(str(path), status), os.geteuid(), is_secret=is_secret))


def _raise(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise IdentityError(refusal.reason, hint=refusal.hint)


def _facts(path: str, status: os.stat_result) -> PathFacts:
    return PathFacts(path, status.st_uid, status.st_gid, status.st_mode)


if sys.platform == "win32":

    def _refuse(path: Path) -> Refusal | None:
        from barnraise.core.ownership.windows_acl import read_access_list, refuse_access_list

        home = home_directory().resolve()
        if path.resolve().is_relative_to(home):  # Windows keeps other users out of a profile
            return None
        text, user = read_access_list(str(path.resolve()))
        return refuse_access_list(str(path), text, user, str(home))

else:
    import grp
    import pwd

    def _refuse(path: Path) -> Refusal | None:
        # Both spellings: another user must not own a link on the way, nor a directory behind it.
        home = home_directory()
        real = _chain(path.resolve(), home.resolve())
        spelled = [facts for facts in _chain(path.absolute(), home) if facts not in real]
        return refuse_directory([*real, *spelled], os.geteuid(), _is_own_group, str(home))

    def _chain(path: Path, home: Path) -> list[PathFacts]:
        """Return the path and its parents, up to the home directory if it is one of them."""
        places = [path, *path.parents]
        if home in places:
            places = places[: places.index(home) + 1]
        return [_facts(str(place), place.lstat()) for place in places]

    def _is_own_group(group: int) -> bool:
        """Return True if no other user is in this group: the private groups of many Linux systems."""
        try:
            entry = pwd.getpwuid(os.geteuid())
            members = set(grp.getgrgid(group).gr_mem)
        except KeyError:
            return False
        if entry.pw_gid != group or members - {entry.pw_name}:
            return False
        return not any(user.pw_gid == group and user.pw_uid != entry.pw_uid for user in pwd.getpwall())
