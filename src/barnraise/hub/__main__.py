"""The hub's process: ``python -m barnraise.hub DIRECTORY [--host HOST] [--port PORT]``.

It imports what a mirror, a region or an object store needs only for them, so that a hub answers soon.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from barnraise.core.errors import BarnraiseError
from barnraise.core.flow.console_log import install_process_log
from barnraise.core.sanitize import printable
from barnraise.hub.private_options import PrivateOptions, take_private_options
from barnraise.hub.protocol.invites import Invite, read_invite
from barnraise.hub.server.server import ListenOptions, check_plain, serve
from barnraise.hub.storage.directory_lock import lock_directory

if TYPE_CHECKING:
    from barnraise.hub.object_store.s3 import BucketUrl
    from barnraise.hub.region.server import MemberSeats

_M_ARENA_MAX = -8  # of mallopt(3)


def run(
    directory: Path,
    listening: ListenOptions,
    *,
    follow: Invite | None = None,
    parent: Invite | None = None,
    seats: MemberSeats | None = None,
    store: BucketUrl | None = None,
    held_out: Path | None = None,
) -> None:
    """Serve a hub, a mirror (``follow``) or a regional hub (``parent``) until SIGINT or SIGTERM.

    Raise HubError if another process uses the directory, or the port is taken; nothing is changed then.
    """
    check_plain(listening)
    install_process_log()
    _limit_arenas()
    with lock_directory(directory):  # until its last thread has ended
        if follow is not None:
            from barnraise.hub.mirror.server import serve_mirror

            asyncio.run(serve_mirror(directory, follow, listening))
        elif parent is not None:
            from barnraise.hub.region.server import serve_region

            asyncio.run(serve_region(directory, parent, listening, seats, store))
        else:
            asyncio.run(serve(directory, listening, store, held_out))


def main(arguments: list[str]) -> int:
    """Parse the command line, run the hub and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m barnraise.hub", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=52480)
    parser.add_argument("--with-parent", action="store_true", help="stop when standard input closes")
    parser.add_argument("--plain", action="store_true", help="no TLS: for a proxy on this machine")
    parser.add_argument(
        "--private-options", metavar="FILE", type=Path, help="invites and addresses; deleted once read"
    )
    parser.add_argument(
        "--seats", type=int, default=0, help="as a region: places for new members of the parent"
    )
    parser.add_argument("--store", metavar="s3://BUCKET/FOLDER", help="also upload blobs to this bucket")
    parser.add_argument(
        "--store-endpoint", metavar="URL", default="", help="endpoint of a store other than Amazon S3"
    )
    parser.add_argument("--held-out", metavar="FILE", type=Path, help="file that validates updates")
    given = parser.parse_args(arguments)
    try:
        private = take_private_options(given.private_options) if given.private_options else PrivateOptions()
        host = given.host or ("127.0.0.1" if given.plain else "0.0.0.0")
        run(
            given.directory,
            ListenOptions(host, given.port, given.plain, given.with_parent),
            follow=read_invite(private.follow) if private.follow else None,
            parent=read_invite(private.parent) if private.parent else None,
            seats=_seats(given.seats, private),
            store=_bucket(given.store, given.store_endpoint),
            held_out=given.held_out,
        )
    except BarnraiseError as error:
        text = printable(str(error), also="\n")
        sys.stderr.write(f"{text}\n")
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _limit_arenas() -> None:
    """Let all threads share two arenas of glibc: each arena keeps what a burst of members needed there."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)


def _seats(count: int, private: PrivateOptions) -> MemberSeats | None:
    if not count or not private.offer:
        return None
    from barnraise.hub.region.server import MemberSeats

    return MemberSeats(count, private.offer, private.pinned)


def _bucket(store: str, endpoint: str) -> BucketUrl | None:
    if not store:
        return None
    from barnraise.hub.object_store.s3 import parse_bucket_url

    return parse_bucket_url(store, endpoint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
