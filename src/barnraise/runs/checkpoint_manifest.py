"""Metadata of checkpoints for machines that do not open them: signature, order and holders.

    step-00000042/state.safetensors    the tensors, t0, t1 ...
    step-00000042/manifest.json        what they are, their hash, and which run and history they come from
    step-00000042/seal.json            the machine that saved it, and its signature

The checkpoint of a split model is in parts, because no machine holds the whole state. Each machine has the
same manifest, which names all parts, and some of the parts. It counts if its holders have all parts together.

    step-00000042/part-0003.safetensors    what is trained in one unit of the model

A checkpoint is valid if its signer may save for the run: an owner's machine, or one that the run spec names.
The signature covers the manifest, and the manifest covers the tensors. So any machine may pass on a copy.
Pure, except for `load_manifest` and `modification_times`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import CheckpointError, ProtocolError
from barnraise.identity import NodeId, NodeKey, verify_signature
from barnraise.identity.trust import TrustLog
from barnraise.runs.record import MOST_MACHINES, Node, RunId, RunSpec, Version

KEPT = 3  # of each run on each machine
KEPT_IN_PARTS = 2  # they are large: a machine has its stage with the optimizer, and its mirrors
MOST_PARTS = 4096
MOST_STEP = 10**12 - 1
STATE, MANIFEST, SEAL = "state.safetensors", "manifest.json", "seal.json"
FILES = (MANIFEST, SEAL, STATE)
LARGEST = {MANIFEST: 128 << 20, SEAL: 4096}
_PURPOSE = b"barnraise checkpoint 1\0"
_OLDER = "An older checkpoint is used instead."
_FOLDER = re.compile(r"step-([0-9]{8,12})")

Step = Annotated[int, Meta(ge=0, le=MOST_STEP)]
Fingerprint = Annotated[bytes, Meta(min_length=32, max_length=32)]
PartNumber = Annotated[int, Meta(ge=0, lt=MOST_PARTS)]
_Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

Machine = TypeVar("Machine")


class CheckpointPart(msgspec.Struct, frozen=True, array_like=True):
    """File of a checkpoint in parts. ``file``: its content id."""

    number: PartNumber
    size: Annotated[int, Meta(ge=0, le=1 << 46)]
    file: _Hex

    @property
    def name(self) -> str:
        """Return the name of the file in the folder of the checkpoint."""
        return part_name(self.number)


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a checkpoint.

    ``digest``: hash of the state, as members compare it. ``previous``: the digest of the checkpoint before
    it. ``file``: content id of the state's file; None if the state is in ``parts``. ``copies``: on how many
    machines the checkpoint, or each part, should be.
    """

    format: Annotated[int, Meta(ge=2, le=2)] = 2
    run: RunId
    step: Step
    generation: Version
    digest: _Hex
    previous: _Hex | None
    file: _Hex | None = None
    skeleton: str
    parts: Annotated[tuple[CheckpointPart, ...], Meta(max_length=MOST_PARTS)] = ()
    provisional: bool = False
    copies: Annotated[int, Meta(ge=1, le=MOST_MACHINES)] = 2


class CheckpointSignature(msgspec.Struct, frozen=True):
    """Signature of a manifest, and the machine that made it."""

    node: Node
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class HeldCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """Checkpoint that a machine holds. ``agreed``: False if it is provisional.

    ``parts``: the ones that the machine has of a checkpoint with ``count`` parts; 0 if it is in one file.
    """

    run: RunId
    step: Step
    agreed: bool
    generation: Version = 0  # in which it was saved
    parts: Annotated[tuple[PartNumber, ...], Meta(max_length=MOST_PARTS)] = ()
    count: Annotated[int, Meta(ge=0, le=MOST_PARTS)] = 0

    @property
    def age(self) -> tuple[int, int]:
        """Return a key that orders checkpoints by time.

        The generation comes first: a dropped branch may have reached higher steps.
        """
        return self.generation, self.step


class FoundCheckpoint(NamedTuple, Generic[Machine]):
    """Checkpoint that machines have together. ``holders``: the parts of each; none if it is in one file."""

    held: HeldCheckpoint
    holders: Mapping[Machine, frozenset[int]]


def to_held_checkpoint(manifest: CheckpointManifest, parts: Iterable[int] = ()) -> HeldCheckpoint:
    """Return the short form of a manifest. ``parts``: those that the machine has."""
    return HeldCheckpoint(
        manifest.run,
        manifest.step,
        not manifest.provisional,
        manifest.generation,
        tuple(sorted(parts)),
        len(manifest.parts),
    )


def part_name(number: int) -> str:
    """Return the name of a part's file."""
    return f"part-{number:04}.safetensors"


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08}"


def modification_times(folder: Path) -> dict[str, float]:
    """Return the modification time of each entry of a folder, by name."""
    written = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a worker's draft that was renamed meanwhile
                written[entry.name] = entry.stat(follow_symlinks=False).st_mtime
    return written


def folder_step(name: str) -> int | None:
    """Return the step in a folder's name; None if it is not a checkpoint's folder."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match is not None else None


def outdated_folders(written: Mapping[str, float], keep: int, kept: int = KEPT) -> list[str]:
    """Return the checkpoint folders that are not among the ``kept`` newest; the one of step ``keep`` stays.

    They are ordered by time, not by step: a dropped branch may have left higher steps.
    """
    ours = [(at, name) for name, at in written.items() if folder_step(name) is not None]
    return [name for _, name in sorted(ours)[:-kept] if folder_step(name) != keep]


# signatures


def fingerprint(manifest: bytes) -> bytes:
    """Return the hash of a manifest, which is what a machine signs."""
    return hashlib.sha256(manifest).digest()


def sign(key: NodeKey, run: str, step: int, manifest: bytes) -> CheckpointSignature:
    """Sign a manifest by its fingerprint, together with run and step, so that it is valid for no other."""
    return CheckpointSignature(key.id.raw, key.sign(_statement(run, step, manifest)))


def allowed_signers(log: TrustLog, spec: RunSpec) -> frozenset[bytes]:
    """Return the machines that may save for a run: every owner, and the guests that the run spec names."""
    members = {node.raw: member.role for node, member in log.members.items()}
    return frozenset(raw for raw, role in members.items() if role == "owner" or raw in spec.nodes)


def read_manifest(
    data: bytes, seal: bytes | None, run: str, may_sign: Collection[bytes]
) -> CheckpointManifest:
    """Return the manifest after checking its signature.

    Raise CheckpointError with the reason if it is not valid.
    """
    if seal is None:
        raise CheckpointError("it is not signed", hint=_OLDER)
    try:
        manifest = decode(_manifests, data, "it cannot be read")
        signature = decode(_seals, seal, "its signature cannot be read")
    except ProtocolError as error:
        raise CheckpointError(error.message, hint=_OLDER) from error
    numbers = {part.number for part in manifest.parts}
    if len(numbers) < len(manifest.parts) or (manifest.file is None) != bool(numbers):
        raise CheckpointError("its manifest names no state, or a part twice", hint=_OLDER)
    if manifest.run != run:
        raise CheckpointError(f"it belongs to run {manifest.run}", hint="Name the run that it belongs to.")
    if signature.node not in may_sign:
        raise CheckpointError(
            "it was not signed by a machine of this cluster", hint="Use a checkpoint of this cluster."
        )
    statement = _statement(manifest.run, manifest.step, fingerprint(data))
    if not verify_signature(NodeId(signature.node), signature.signature, statement):
        raise CheckpointError("it was changed after it was signed", hint=_OLDER)
    return manifest


def load_manifest(place: Path, run: str, may_sign: Collection[bytes]) -> CheckpointManifest:
    """Load the manifest of a checkpoint on disk; raise CheckpointError with the reason if it is not valid."""
    try:
        data = _bounded(place / MANIFEST)
        seal = _bounded(place / SEAL) if (place / SEAL).exists() else None
    except OSError as error:
        raise CheckpointError(f"it cannot be read ({error})", hint=_OLDER) from error
    return read_manifest(data, seal, run, may_sign)


def _bounded(path: Path) -> bytes:
    if path.stat().st_size > LARGEST[path.name]:
        raise CheckpointError(f"its {path.name} is too large", hint=_OLDER)
    return path.read_bytes()


def encode(document: CheckpointManifest | CheckpointSignature) -> bytes:
    """Encode a manifest or signature as its file."""
    return msgspec.json.encode(document)


# order and copies


def find_checkpoints(
    held: Mapping[Machine, Iterable[HeldCheckpoint]], *, incomplete: bool = False
) -> list[FoundCheckpoint[Machine]]:
    """Return the checkpoints that these machines hold; of those in parts also ``incomplete`` ones, or not.

    A checkpoint in parts is agreed if any of its holders knows that it is.
    """
    by_checkpoint: dict[HeldCheckpoint, dict[Machine, HeldCheckpoint]] = {}
    for machine, checkpoints in held.items():
        for each in checkpoints:
            key = msgspec.structs.replace(each, parts=(), agreed=each.agreed or each.count > 0)
            by_checkpoint.setdefault(key, {})[machine] = each
    result = []
    for key, holders in by_checkpoint.items():
        if incomplete or len({part for each in holders.values() for part in each.parts}) >= key.count:
            agreed = any(each.agreed for each in holders.values())
            parts = {machine: frozenset(each.parts) for machine, each in holders.items()}
            result.append(FoundCheckpoint(msgspec.structs.replace(key, agreed=agreed), parts))
    return result


def newest_checkpoint(held: Iterable[HeldCheckpoint], runs: Sequence[str]) -> HeldCheckpoint | None:
    """Return the newest checkpoint of the first run that has any; an agreed one before a provisional one."""
    places = {run: place for place, run in enumerate(runs)}
    known = [checkpoint for checkpoint in held if checkpoint.run in places]
    return max(
        known,
        key=lambda checkpoint: (-places[checkpoint.run], checkpoint.agreed, checkpoint.age),
        default=None,
    )


def next_copy_target(
    me: bytes, holders: Collection[bytes], candidates: Sequence[bytes], copies: int
) -> bytes | None:
    """Return the next machine to replicate to. Deterministic, so that only one holder sends."""
    if len(holders) >= copies or me != min(holders, default=b""):
        return None
    return next((node for node in candidates if node not in holders), None)


def next_part_copies(
    me: bytes, holders: Mapping[bytes, frozenset[int]], candidates: Sequence[bytes], copies: int
) -> tuple[bytes, tuple[int, ...]] | None:
    """Return the next machine to replicate to, and which parts of this machine; None if there is none.

    ``holders``: the parts of each machine.
    """
    targets: dict[bytes, list[int]] = {}
    for part in sorted(holders.get(me, ())):
        those = [node for node, parts in holders.items() if part in parts]
        target = next_copy_target(me, those, candidates, copies)
        if target is not None:
            targets.setdefault(target, []).append(part)
    return next(((target, tuple(parts)) for target, parts in targets.items()), None)


def lacks_copies(me: bytes, holders: Mapping[bytes, frozenset[int]], copies: int) -> bool:
    """Tell whether any part of this machine is on fewer machines than it should be."""
    own = holders.get(me, frozenset())
    return any(sum(part in parts for parts in holders.values()) < copies for part in own)


def plan_fetch(
    missing: Collection[int], holders: Mapping[Machine, frozenset[int]]
) -> tuple[Machine, tuple[int, ...]] | None:
    """Return the machine that has most of the missing parts, and these; None if no machine has any."""
    offers = {machine: tuple(sorted(parts.intersection(missing))) for machine, parts in holders.items()}
    best = max(offers, key=lambda machine: len(offers[machine]), default=None)
    return (best, offers[best]) if best is not None and offers[best] else None


def _statement(run: str, step: int, manifest: bytes) -> bytes:
    return _PURPOSE + _encoder.encode((run, step, manifest))


_encoder = msgspec.msgpack.Encoder()
_manifests: msgspec.json.Decoder[CheckpointManifest] = msgspec.json.Decoder(CheckpointManifest)
_seals: msgspec.json.Decoder[CheckpointSignature] = msgspec.json.Decoder(CheckpointSignature)
