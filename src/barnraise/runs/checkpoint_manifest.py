"""Metadata of checkpoints for machines that do not open them: signature, order and holders.

    step-00000042/state.safetensors    the tensors, t0, t1 ...
    step-00000042/manifest.json        what they are, their hash, and which run and history they come from
    step-00000042/seal.json            the machine that saved it, and its signature

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
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import CheckpointError, ProtocolError
from barnraise.identity import NodeId, NodeKey, verify_signature
from barnraise.identity.trust import TrustLog
from barnraise.runs.record import MOST_MACHINES, Node, RunId, RunSpec, Version

KEPT = 3  # of each run on each machine
MOST_STEP = 10**12 - 1
STATE, MANIFEST, SEAL = "state.safetensors", "manifest.json", "seal.json"
FILES = (MANIFEST, SEAL, STATE)
LARGEST = {MANIFEST: 128 << 20, SEAL: 4096}
_PURPOSE = b"barnraise checkpoint 1\0"
_OLDER = "An older checkpoint is used instead."
_FOLDER = re.compile(r"step-([0-9]{8,12})")

Step = Annotated[int, Meta(ge=0, le=MOST_STEP)]
Fingerprint = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a checkpoint.

    ``digest``: hash of the state, as members compare it. ``previous``: the digest of the checkpoint before
    it. ``file``: content id of the state's file. ``copies``: on how many machines the checkpoint should be.
    """

    format: Annotated[int, Meta(ge=2, le=2)] = 2
    run: RunId
    step: Step
    generation: Version
    digest: _Hex
    previous: _Hex | None
    file: _Hex
    skeleton: str
    provisional: bool = False
    copies: Annotated[int, Meta(ge=1, le=MOST_MACHINES)] = 2


class CheckpointSignature(msgspec.Struct, frozen=True):
    """Signature of a manifest, and the machine that made it."""

    node: Node
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class HeldCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """Checkpoint that a machine holds. ``agreed``: False if it is provisional."""

    run: RunId
    step: Step
    agreed: bool
    generation: Version = 0  # in which it was saved

    @property
    def age(self) -> tuple[int, int]:
        """Return a key that orders checkpoints by time.

        The generation comes first: a dropped branch may have reached higher steps.
        """
        return self.generation, self.step


def to_held_checkpoint(manifest: CheckpointManifest) -> HeldCheckpoint:
    """Return the short form of a manifest."""
    return HeldCheckpoint(manifest.run, manifest.step, not manifest.provisional, manifest.generation)


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


def outdated_folders(written: Mapping[str, float], keep: int) -> list[str]:
    """Return the checkpoint folders that are not among the newest; the folder of step ``keep`` stays.

    They are ordered by time, not by step: a dropped branch may have left higher steps.
    """
    ours = [(at, name) for name, at in written.items() if folder_step(name) is not None]
    return [name for _, name in sorted(ours)[:-KEPT] if folder_step(name) != keep]


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


def _statement(run: str, step: int, manifest: bytes) -> bytes:
    return _PURPOSE + _encoder.encode((run, step, manifest))


_encoder = msgspec.msgpack.Encoder()
_manifests: msgspec.json.Decoder[CheckpointManifest] = msgspec.json.Decoder(CheckpointManifest)
_seals: msgspec.json.Decoder[CheckpointSignature] = msgspec.json.Decoder(CheckpointSignature)
