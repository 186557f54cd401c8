"""Addresses of a hub: files in its directory that the commands write and the hub's process reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_ADDRESSES, _MORE = "addresses", "more-addresses"


def known_addresses(directory: Path) -> tuple[str, ...]:
    """Return the addresses that new invites name."""
    return _read(directory / _ADDRESSES)


def all_addresses(directory: Path) -> tuple[str, ...]:
    """Return every address by which members may reach the hub."""
    return tuple(dict.fromkeys((*known_addresses(directory), *_read(directory / _MORE))))


def write_addresses(directory: Path, addresses: Sequence[str]) -> None:
    _write(directory / _ADDRESSES, addresses)


def add_addresses(directory: Path, addresses: Sequence[str]) -> None:
    """Remember further addresses, which single invites name."""
    more = [address for address in addresses if address not in all_addresses(directory)]
    if more:
        _write(directory / _MORE, [*_read(directory / _MORE), *more])


def _read(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text("utf-8").split()) if path.exists() else ()


def _write(path: Path, addresses: Sequence[str]) -> None:
    path.write_text("\n".join(addresses) + "\n", "utf-8")
