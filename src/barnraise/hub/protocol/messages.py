"""Messages between a hub and its members: typed and bounded JSON bodies. Blobs are not messages.

Times are durations, or seconds by the hub's clock. A node is named by its printed id, a blob by the SHA-256
of its content.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import HubError

PROTOCOL = 1
PIECE_BYTES = 1 << 20  # the most that one PATCH may carry
MOST_MESSAGE_BYTES = 8 << 20

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}\\Z")]
NodeText = Annotated[str, Meta(pattern="^[0-9A-Z-]{69}\\Z")]
LeaseId = Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}\\Z")]
Address = Annotated[str, Meta(pattern="^https?://[A-Za-z0-9.:/_~%\\[\\]-]{1,400}\\Z")]
Origin = Annotated[str, Meta(pattern="^https?://[A-Za-z0-9.:\\[\\]-]{1,300}\\Z")]
CodecName = Annotated[str, Meta(pattern="^[a-z0-9]{1,16}(:[a-z0-9=,]{1,48})?(\\+zlib)?\\Z")]
Sentence = Annotated[str, Meta(max_length=2000)]
Version = Annotated[int, Meta(ge=0, le=1 << 40)]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Size = Annotated[int, Meta(ge=1, le=1 << 44)]
Seconds = Annotated[float, Meta(ge=0, le=604_800)]
LeaseTime = Annotated[float, Meta(ge=0, le=1 << 27)]  # what the longest rounds come to, by the slowest terms
Role = Literal["owner", "friend", "stranger", "mirror", "region"]
Signature = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{86}\\Z")]
Moment = Annotated[int, Meta(ge=0, le=1 << 40)]  # seconds since 1970 by the hub's clock
Addresses = Annotated[tuple[Address, ...], Meta(min_length=1, max_length=8)]
MOST_REGIONS = 16
MOST_SEATS = 10_000


class VectorEntry(msgspec.Struct, frozen=True, array_like=True):
    """Name, shape and type of one parameter."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 40)], ...], Meta(max_length=16)]
    dtype: Literal["float32", "float16", "bfloat16", "float64"]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class VectorLayout(msgspec.Struct, frozen=True):
    """The parameters in their order. Flattened and concatenated, they are the vector that is sent."""

    entries: Annotated[tuple[VectorEntry, ...], Meta(min_length=1, max_length=100_000)]

    @property
    def numel(self) -> int:
        return sum(entry.numel for entry in self.entries)


class HubDataOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the order of the samples; fields of ``runs.sharding.DataOrder``."""

    samples: Annotated[int, Meta(ge=1, le=1 << 50)]
    batch: Annotated[int, Meta(ge=1, le=1 << 30)]  # samples of one inner step
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    shuffle: bool = True
    epochs: Annotated[int, Meta(ge=1, le=1 << 20)] = 1


class RoundConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a hub's rounds. Fixed when the hub is created."""

    codec: CodecName = "int8"  # of what members send
    delta_codec: CodecName = "int8"  # of what the hub sends, with error feedback
    base_codec: CodecName = "fp32"
    chunk: Annotated[int, Meta(ge=1 << 10, le=1 << 20, multiple_of=1 << 10)] = 1 << 16  # numbers
    base_every: Annotated[int, Meta(ge=1, le=1024)] = 16  # versions
    # Of the outer step; as a session's rounds of some dozen steps, see docs/benchmarks/plans.md.
    rate: Annotated[float, Meta(gt=0, le=10)] = 1.0
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.6
    round_s: Annotated[float, Meta(ge=0.05, le=86_400)] = 30.0  # of inner training that a lease is cut for
    grace: Annotated[float, Meta(ge=0, le=4)] = 0.25  # of round_s, after the quorum is there
    slack_s: Annotated[float, Meta(ge=0, le=3600)] = 5.0  # for a member's network, in addition to the grace
    quorum: Annotated[float, Meta(gt=0, le=1)] = 0.6
    wait_for: Annotated[int, Meta(ge=1, le=MOST_SEATS)] = 1  # members that the first round starts with
    stale_limit: Annotated[int, Meta(ge=0, le=64)] = 2  # versions behind
    rounds: Version = 0  # after which the run is over; 0: when all samples are trained on
    linear_scaling: bool = False  # steps of a whole batch, and learning rates times the members
    first_batches: Annotated[int, Meta(ge=1, le=1 << 20)] = 4  # for a member of unknown speed
    trim: Annotated[float, Meta(ge=0, lt=0.5)] = 0.25  # of the updates on each side, if a stranger takes part
    clip_over: Annotated[float, Meta(gt=1)] = 3.0  # times the median norm, running and of the round
    refuse_over: Annotated[float, Meta(gt=1)] = 10.0  # times that of the round
    refusals: Annotated[int, Meta(ge=1, le=1000)] = 3  # before quarantine


class CodeDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The code that runs at a member; stored as a blob that the run's description names."""

    entry: Annotated[str, Meta(min_length=1, max_length=1024)]
    arguments: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=256)] = ()
    manifest: Sha256  # blob: as barnraise.artifacts encodes it
    contents: Annotated[
        tuple[Sha256, ...], Meta(max_length=50_000)
    ]  # blobs, as Manifest.objects() lists them


class RunDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Public description of a run: `GET /v1/run`."""

    protocol: int
    hub: NodeText
    name: Name
    owner: NodeText
    terms: RoundConfig
    code: Sha256 | None = None
    layout: VectorLayout | None = None  # with course: as soon as the owner has pushed the base
    course: HubDataOrder | None = None
    version: Version | None = None
    finished: bool = False
    store: Origin | None = None  # where its blobs may come from, too


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to join: `POST /v1/members`, signed with the joining member's key. Repeating it is harmless.

    It holds the public half of an invite's key. ``proof``: see `admission`.
    """

    invite: NodeText
    role: Role
    expires: Moment
    proof: Signature
    name: Name


class RegionPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A region that has a seat left. It admits only members that its parent sends."""

    hub: NodeText
    addresses: Addresses
    pinned: bool


class JoinResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Role of the new member, and the regions that have a seat left."""

    role: Role
    description: RunDescription
    regions: Annotated[tuple[RegionPlace, ...], Meta(max_length=MOST_REGIONS)] = ()


class RegionOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Seats of a region for new members of its parent: `POST /v1/regions`, repeated."""

    addresses: Addresses
    pinned: bool
    seats: Annotated[int, Meta(ge=0, le=MOST_SEATS)]  # that are free


class RegionOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a region, by their ids there, whose seats its parent has ended."""

    ended: Annotated[tuple[NodeText, ...], Meta(max_length=MOST_SEATS)]
    time: Moment  # by the parent's clock


class SeatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a seat at a region: `POST /v1/seats`. A member has one seat at a time."""

    region: NodeText
    member: NodeText  # this member's id at the region
    name: Name


class SeatGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The parent's proof for the region, as the request with which the member joins there."""

    request: JoinRequest


class ExpelResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an expulsion: the invite that was withdrawn, and the other members that came with it."""

    invite: str  # empty if the member came without one of this hub
    others: Annotated[tuple[Name, ...], Meta(max_length=MOST_SEATS)]


class SampleSpan(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Positions ``first`` to ``last`` (exclusive) in the order of an epoch."""

    epoch: Count
    first: Count
    last: Count

    @property
    def size(self) -> int:
        return self.last - self.first


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a lease: `POST /v1/leases`. A member that asks again gets the lease it holds."""

    samples_per_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # measured; 0: not known yet
    version: Version  # the state that it holds and would begin from


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that a member trains on, and the version to start from."""

    id: LeaseId
    version: Version  # to begin from
    spans: Annotated[tuple[SampleSpan, ...], Meta(max_length=4096)]
    steps: Count  # H: inner steps of `HubDataOrder.batch` samples that cover the spans
    seconds: LeaseTime  # in which the hub expects the update
    void_s: LeaseTime  # from now on, until another member gets the spans
    covered: Count = 0  # samples that the chain has behind it, which schedules follow
    members: Count = 1  # that train at the same time, by the last round and the active leases

    @property
    def samples(self) -> int:
        return sum(span.size for span in self.spans)


class UpdateDeclaration(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of an upload: `POST /v1/uploads`. Repeating it resumes the upload."""

    kind: Literal["update", "base"] = "update"
    sha256: Sha256
    size: Size
    lease: LeaseId | None = None  # of an update
    version: Version = 0  # that the update begins from
    samples: Count = 0  # that were trained on, at most those of the lease
    trained: Annotated[
        tuple[SampleSpan, ...], Meta(max_length=4096)
    ] = ()  # which; if none, the lease's first
    loss: Annotated[float, Meta(ge=-1e30, le=1e30)] | None = None
    merged: Annotated[int, Meta(ge=1, le=1 << 32)] = 1  # updates of its members that a region made one of
    has_strangers: bool = False  # a stranger's update is among these
    layout: VectorLayout | None = None  # of a base
    course: HubDataOrder | None = None


class HubProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of an upload: response to POST and GET, and to `PATCH /v1/uploads/{id}?offset=N`."""

    id: LeaseId
    offset: Count  # send what begins here
    size: Size
    piece: Size = PIECE_BYTES
    accepted: bool = False  # all of it arrived and was admitted
    weight: float = 0.0
    clipped: float = 1.0  # what it is multiplied with, unless all of its round are as large


class VersionStep(msgspec.Struct, frozen=True, array_like=True):
    """A blob that leads to a version: a base sets the state, a delta is added to it."""

    kind: Literal["base", "delta"]
    version: Version
    sha256: Sha256
    size: Size
    codec: CodecName
    signature: Annotated[str, Meta(pattern="^([A-Za-z0-9_-]{86})?$")] = ""  # of the run's hub, see `chain`


class VersionHead(msgspec.Struct, frozen=True, kw_only=True):
    """Steps to the newest version, from V or from a base: `GET /v1/head?after=V&wait=S`."""

    version: Version
    steps: Annotated[tuple[VersionStep, ...], Meta(max_length=4096)]
    waits_for: Sentence = ""  # if there is nothing new
    finished: bool = False


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every error response."""

    kind: Annotated[str, Meta(max_length=64)]
    message: Sentence
    hint: Sentence
    time: float = 0.0  # the hub's clock, of a refused signature
    retry_s: Seconds = 0.0
    offset: Count | None = None  # of a piece at the wrong place
    quarantined: bool = False


T = TypeVar("T", bound=msgspec.Struct)
_encoder = msgspec.json.Encoder()
_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[msgspec.Struct]] = {}


def encode_message(message: msgspec.Struct | msgspec.Raw) -> bytes:
    """Encode a message; equal messages give equal bytes. ``Raw``: one that is encoded already."""
    return _encoder.encode(message)


def decode_message(kind: type[T], data: bytes) -> T:
    """Decode a message of this kind. Raise ProtocolError for anything else."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    message = decode(decoder, data, f"this is not a message of kind {kind.__name__}")
    assert isinstance(message, kind)
    return message


def check_layout(layout: VectorLayout) -> None:
    """Raise HubError unless the parameter names are unique and the layout is not empty."""
    names = [entry.name for entry in layout.entries]
    if len(set(names)) != len(names) or not 0 < layout.numel <= 1 << 40:
        raise HubError(
            "the list of parameters names one twice, or nothing at all",
            hint="Give each parameter that is trained to the session once.",
        )
