"""Requests about notifications to this machine's agent, and the responses. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.agent_client.notifications.targets import EVENTS, EventName, Target

MAX_TARGETS = 32

MAX_NAME = 64

TargetName = Annotated[str, Meta(max_length=MAX_NAME)]


class AddTargetRequest(msgspec.Struct, frozen=True, tag="notify-add?"):
    """Send the notices of these events to a target from now on."""

    target: Target
    events: Annotated[tuple[EventName, ...], Meta(min_length=1, max_length=len(EVENTS))] = EVENTS


class ListTargetsRequest(msgspec.Struct, frozen=True, tag="notify-list?"):
    """Request for the targets of this machine, without their secrets."""


class RemoveTargetRequest(msgspec.Struct, frozen=True, tag="notify-remove?"):
    """Remove a target, its secrets, and the notices that wait for it."""

    name: TargetName


class TargetTestRequest(msgspec.Struct, frozen=True, tag="notify-test?"):
    """Send a test notice to a target now; empty: to all."""

    name: TargetName | None = None


class TargetRow(msgspec.Struct, frozen=True, kw_only=True):
    """Target as people see it. ``failure``: what its last attempt failed with; empty after a success.

    ``waiting``: notices that are tried again. ``dropped``: notices that were given up since the last success.
    """

    name: str
    address: str
    events: tuple[str, ...]
    delivered: int = 0
    delivered_at: float | None = None
    waiting: int = 0
    dropped: int = 0
    failure: str = ""
    failed_at: float | None = None


class TargetsResponse(msgspec.Struct, frozen=True, tag="notify-targets"):
    """Targets of this machine. ``note``: what its user should know of the one that was added, or of all."""

    targets: Annotated[tuple[TargetRow, ...], Meta(max_length=MAX_TARGETS)]
    note: str = ""


class TargetTestRow(msgspec.Struct, frozen=True):
    """Result of a test; ``failure`` is empty if the target took the notice."""

    name: str
    address: str
    failure: str = ""


class TargetTestResponse(msgspec.Struct, frozen=True, tag="notify-tested"):
    """Results of a test, for each target."""

    rows: Annotated[tuple[TargetTestRow, ...], Meta(max_length=MAX_TARGETS)]


NotificationRequest = AddTargetRequest | ListTargetsRequest | RemoveTargetRequest | TargetTestRequest
NotificationAnswer = TargetsResponse | TargetTestResponse
