"""Limits that a machine's user sets for all runs on it, and their file. Pure but for the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ConfigError, ProtocolError
from barnraise.core.files import write_atomically
from barnraise.core.host.daily_hours import DailyHours

Wish = Literal["wait", "allow"]

SEND_MBPS_VARIABLE = "BARNRAISE_SEND_MBPS"  # of a worker: its share of the limit

_FILE = "limits.json"
_LARGEST_FILE = 1 << 16


class MachineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the use of this machine. Zero or empty means that there is no such limit.

    ``hours`` is such as ``22:30-07:00``: the only hours in which runs of other machines use this one.
    ``paused_by``: name of the machine from which a person paused this one; empty: this machine itself.
    """

    paused: bool = False
    paused_until: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # Unix time; 0: until the user resumes it
    paused_by: Annotated[str, Meta(max_length=64)] = ""
    hours: Annotated[str, Meta(max_length=32)] = ""
    battery: Wish = "wait"
    metered: Wish = "wait"
    cpus: Annotated[int, Meta(ge=0, le=4096)] = 0
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0  # of each worker
    gpu_memory_percent: Annotated[int, Meta(ge=0, le=100)] = 0
    mbps: Annotated[float, Meta(ge=0, le=1e6)] = 0.0  # that workers send

    def __post_init__(self) -> None:
        try:
            DailyHours.parse(self.hours, "hours")
        except ConfigError as error:  # a decoder rejects the whole message or file
            raise ValueError(error.message) from error


_limits = msgspec.json.Decoder(MachineLimits)


def load_limits(directory: Path) -> MachineLimits:
    """Return the limits in a state directory; none if there is no file, or a damaged one."""
    try:
        with open(directory / _FILE, "rb") as file:
            return decode(_limits, file.read(_LARGEST_FILE), "the file of limits cannot be read")
    except (OSError, ProtocolError):
        return MachineLimits()


def save_limits(directory: Path, limits: MachineLimits) -> None:
    """Write the limits to a state directory."""
    write_atomically(directory / _FILE, msgspec.json.format(msgspec.json.encode(limits)), synced=True)
