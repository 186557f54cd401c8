"""Requests of the command line to this machine's agent, and the responses. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.agent_client.history.requests import HistoryAnswer, HistoryRequest
from barnraise.agent_client.kv_messages import ClusterRequest, KvRequest
from barnraise.agent_client.machine_limits import MachineLimits
from barnraise.agent_client.metrics.requests import (
    HealthRequest,
    HealthResponse,
    MetricsReport,
    MetricsRequest,
    MetricsResponse,
)
from barnraise.agent_client.notifications.requests import NotificationAnswer, NotificationRequest
from barnraise.agent_client.queue.requests import QueueAnswer, QueueRequest
from barnraise.agent_client.run_requests import RunRequest, RunResponse
from barnraise.core.decoding import decode

Text = Annotated[str, Meta(max_length=2000)]
Role = Literal["owner", "guest"]


class StatusRequest(msgspec.Struct, frozen=True, tag="status?"):
    """Request for the state of the cluster."""


class PairRequest(msgspec.Struct, frozen=True, tag="pair?"):
    """Open a code for one machine."""

    role: Role = "owner"


class OfferRequest(msgspec.Struct, frozen=True, tag="offer?"):
    """Request for the state of a pairing code; ``withdraw`` closes the code."""

    withdraw: bool = False


class JoinClusterRequest(msgspec.Struct, frozen=True, tag="join?"):
    """Join the cluster of the machine that shows this code; ``role`` is what the user agrees to, if said."""

    code: Text
    at: Text = ""
    role: Role | None = None
    patience_s: Annotated[float, Meta(gt=0, le=600)] = 30.0


class UnpairRequest(msgspec.Struct, frozen=True, tag="unpair?"):
    """Request to remove a machine permanently."""

    node: Text


class RenameRequest(msgspec.Struct, frozen=True, tag="rename?"):
    """Call this machine so."""

    name: Text


class RotateKeyRequest(msgspec.Struct, frozen=True, tag="rotate?"):
    """Give this machine a new key, and start its agent again with it."""


class ContinueRequest(msgspec.Struct, frozen=True, tag="continue?"):
    """The user is the witness that these machines are gone."""

    without: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=64)]


class PskRequest(msgspec.Struct, frozen=True, tag="psk?"):
    """Make a pre-shared key that admits machines in this role."""

    role: Role = "owner"


class MeasureRequest(msgspec.Struct, frozen=True, tag="measure?"):
    """Measure the links of this machine now."""


class CheckRequest(msgspec.Struct, frozen=True, tag="check?"):
    """Request for the problems that the agent finds."""


class LeaveRequest(msgspec.Struct, frozen=True, tag="leave?"):
    """Say goodbye, end, and forget the cluster and this machine's key."""


class CleanRequest(msgspec.Struct, frozen=True, tag="clean?"):
    """Request for the unneeded files of this machine, or to remove them.

    ``run``: only this run. ``everything``: also runs that can be resumed. ``agreed``: remove these keys of
    an earlier response, and no others; None removes nothing.
    """

    run: Text = ""
    everything: bool = False
    agreed: Annotated[tuple[Text, ...], Meta(max_length=4096)] | None = None


class LimitsRequest(msgspec.Struct, frozen=True, tag="limits?"):
    """Request for the limits of this machine, or to change them."""

    limits: MachineLimits | None = None


class PauseMachineRequest(msgspec.Struct, frozen=True, tag="pause?"):
    """Request to pause a machine of the cluster, or to let runs use it again.

    ``machine``: its name or id. ``until``: Unix time at which the pause ends; 0: it has no end.
    """

    machine: Text
    paused: bool
    until: Annotated[float, Meta(ge=0, le=1e12)] = 0.0


class OpenPageRequest(msgspec.Struct, frozen=True, tag="open?"):
    """Request for a one-time link to the page. ``machine``: of another owner's machine; empty: this one."""

    machine: Text = ""


class ShutdownRequest(msgspec.Struct, frozen=True, tag="down?"):
    """Say goodbye and end."""


AgentRequest = (
    StatusRequest
    | PairRequest
    | OfferRequest
    | JoinClusterRequest
    | UnpairRequest
    | RenameRequest
    | RotateKeyRequest
    | ContinueRequest
    | PskRequest
    | MeasureRequest
    | CheckRequest
    | LeaveRequest
    | CleanRequest
    | LimitsRequest
    | PauseMachineRequest
    | OpenPageRequest
    | ShutdownRequest
    | MetricsReport
    | MetricsRequest
    | HealthRequest
    | NotificationRequest
)

# Workers send requests to the store through the same socket.
AnyAgentRequest = AgentRequest | RunRequest | QueueRequest | HistoryRequest | KvRequest | ClusterRequest


class DeviceRow(msgspec.Struct, frozen=True):
    """A device as `status` shows it."""

    kind: str
    name: str
    memory_bytes: int
    tflops: float | None = None
    memory_gbps: float | None = None


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the cluster."""

    node: str
    short: str
    name: str
    role: Role
    state: Literal["this", "here", "joining", "silent", "away"]
    seniority: int | None = None
    coordinator: bool = False
    votes: bool = True
    works: bool = True
    address: str = ""
    why_address: str = ""
    rtt_ms: float | None = None
    mbps: float | None = None
    os: str = ""
    python: str = ""
    torch: str = ""
    version: str = ""
    devices: tuple[DeviceRow, ...] = ()
    notes: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()  # runs that have workers there now
    paused: str = ""  # why runs of other machines may not use it now


class PeerLinkRow(msgspec.Struct, frozen=True):
    """Measured link between two machines."""

    a: str
    b: str
    rtt_ms: float | None
    mbps: float | None
    address: str = ""


class DiskUse(msgspec.Struct, frozen=True):
    """Bytes that Barnraise uses on this machine's disk."""

    runs: int
    files: int
    environments: int

    @property
    def total(self) -> int:
        return self.runs + self.files + self.environments


class StatusResponse(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """The cluster as this machine sees it."""

    cluster: str
    branch: int
    view: int
    member: bool
    decides: bool
    sentence: str
    coordinator: str
    why_coordinator: str
    nodes: tuple[NodeRow, ...]
    links: tuple[PeerLinkRow, ...]
    port: int
    pid: int
    encryption: str
    version: str
    picture: str = ""
    offer: str = ""
    recent: tuple[str, ...] = ()
    up_s: float = 0.0
    name_clashes: tuple[str, ...] = ()
    disk: DiskUse | None = None  # of this machine; None if it was not measured yet


class CleanRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something on the disk that can be removed or has to stay. ``lost``: what becomes impossible."""

    kind: Literal["run", "files", "environment"]
    name: str
    bytes: int
    why: str
    lost: str = ""

    @property
    def key(self) -> str:
        return f"{self.kind} {self.name}"


class CleanResponse(msgspec.Struct, frozen=True, kw_only=True, tag="clean"):
    """Rows that can be removed, or were removed; runs that stay; and the freed bytes."""

    rows: tuple[CleanRow, ...]
    kept: tuple[CleanRow, ...] = ()
    freed: int = 0


class LimitsResponse(msgspec.Struct, frozen=True, kw_only=True, tag="limits"):
    """The limits of this machine, why it is paused now, and what that means for each run on it."""

    limits: MachineLimits
    reason: str = ""
    runs: tuple[tuple[str, str], ...] = ()


class OpenPageResponse(msgspec.Struct, frozen=True, tag="open"):
    """One-time link to the page of a machine."""

    link: str
    machine: str


class OfferResponse(msgspec.Struct, frozen=True, tag="offer"):
    """A code, or what became of it. ``granted`` says what the other machine may do now."""

    state: str
    sentence: str
    code: str = ""
    role: str = ""
    seconds_left: float = 0.0
    granted: str = ""


class RequestDone(msgspec.Struct, frozen=True, tag="done"):
    """It is done; ``secret`` is shown once and kept nowhere by the command line."""

    sentence: str
    secret: str = ""


class CheckRow(msgspec.Struct, frozen=True):
    """One check of the doctor: fine, or a problem with its fix."""

    name: str
    state: Literal["ok", "warn", "fail"]
    sentence: str
    fix: str = ""
    peer: str = ""


class CheckResponse(msgspec.Struct, frozen=True, tag="check"):
    """Checks that only the agent can make."""

    rows: tuple[CheckRow, ...]


AgentResponse = (
    StatusResponse
    | OfferResponse
    | RequestDone
    | CheckResponse
    | CleanResponse
    | LimitsResponse
    | MetricsResponse
    | HealthResponse
    | NotificationAnswer
    | OpenPageResponse
    | RunResponse
    | QueueAnswer
    | HistoryAnswer
)

_MISUNDERSTOOD = "the agent and the command line do not understand each other"
_OTHER_VERSION = "They are of different versions: restart the agent (barnraise down, then barnraise up)."
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyAgentRequest] = msgspec.msgpack.Decoder(AnyAgentRequest)
_responses: msgspec.msgpack.Decoder[AgentResponse] = msgspec.msgpack.Decoder(AgentResponse)


def encode(message: AgentRequest | RunRequest | QueueRequest | HistoryRequest | AgentResponse) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> AnyAgentRequest:
    return decode(_requests, data, _MISUNDERSTOOD, hint=_OTHER_VERSION)


def decode_response(data: bytes) -> AgentResponse:
    return decode(_responses, data, _MISUNDERSTOOD, hint=_OTHER_VERSION)
