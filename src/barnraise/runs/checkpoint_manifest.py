"""What a checkpoint is to machines that need not open it: who vouches for it, which counts, who has it.

    step-00000042/state.safetensors    the tensors, t0, t1 ...
    step-00000042/manifest.json        what they are, their hash, and which run and history they come from
    step-00000042/seal.json            the machine that saved it, and its signature

A checkpoint counts if a machine signed it that may save for its run: an owner's, or one that the run's order
names. The signature covers the manifest, and the manifest the tensors, so that it does not matter who passes
a copy on. Pure, but for `load_manifest` and `modification_times`.
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
from barnraise.core.errors import ProtocolError, RunError
from barnraise.identity import NodeId, NodeKey, verify_signature
from barnraise.identity.trust import TrustLog
from barnraise.runs.record import MOST_MACHINES, Node, RunId, RunSpec, Version

KEPT = 3  # of each run on each machine
MOST_STEP = 10**12 - 1
STATE, MANIFEST, SEAL = "state.safetensors", "manifest.json", "seal.json"
FILES = (MANIFEST, SEAL, STATE)
LARGEST = {MANIFEST: 128 << 20, SEAL: 4096}
_PURPOSE = b"barnraise checkpoint 1\0"
_OLDER = "An older one is taken instead."
_FOLDER = re.compile(r"step-([0-9]{8,12})")

Step = Annotated[int, Meta(ge=0, le=MOST_STEP)]
Fingerprint = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """``digest`` is the hash of the state, as members compare it; ``previous`` is that of the one before it.
    ``file`` names the bytes of the state's file as the store of contents does. ``copies``: on how many
    machines it should be.
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
    """Who vouches for a manifest."""

    node: Node
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class HeldCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that a machine has; ``agreed``: not only provisionally."""

    run: RunId
    step: Step
    agreed: bool
    generation: Version = 0  # in which it was saved

    @property
    def age(self) -> tuple[int, int]:
        """The higher, the later. A branch that was given up may have come further before it was."""
        return self.generation, self.step


def to_held_checkpoint(manifest: CheckpointManifest) -> HeldCheckpoint:
    return HeldCheckpoint(manifest.run, manifest.step, not manifest.provisional, manifest.generation)


def folder_name(step: int) -> str:
    return f"step-{step:08}"


def modification_times(folder: Path) -> dict[str, float]:
    """The names of what is in there, and when each was written."""
    written = {}
    with os.scandir(folder) as found:
        for one in found:
            with contextlib.suppress(FileNotFoundError):  # a worker's draft, which has its name just now
                written[one.name] = one.stat(follow_symlinks=False).st_mtime
    return written


def folder_step(name: str) -> int | None:
    """The step that a folder's name says; None if it is no checkpoint's."""
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found is not None else None


def outdated_folders(written: Mapping[str, float], keep: int) -> list[str]:
    """The folders of checkpoints that are not among the last that were written; that of step ``keep`` stays.

    By time, not by step: what a dropped branch left may have higher steps than all that is saved now.
    """
    ours = [(at, name) for name, at in written.items() if folder_step(name) is not None]
    return [name for _, name in sorted(ours)[:-KEPT] if folder_step(name) != keep]


# who vouches for it


def fingerprint(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).digest()


def sign(key: NodeKey, run: str, step: int, manifest: bytes) -> CheckpointSignature:
    """``manifest`` is its fingerprint. Run and step stand beside it, so that no other can be signed."""
    return CheckpointSignature(key.id.raw, key.sign(_statement(run, step, manifest)))


def allowed_signers(log: TrustLog, order: RunSpec) -> frozenset[bytes]:
    """Who may save for a run: every owner, and a guest that the order names. Nobody who was removed."""
    members = {node.raw: member.role for node, member in log.members.items()}
    return frozenset(raw for raw, role in members.items() if role == "owner" or raw in order.nodes)


def read_manifest(
    data: bytes, seal: bytes | None, run: str, may_sign: Collection[bytes]
) -> CheckpointManifest:
    """What is in the files of those names; RunError with the reason if it does not count."""
    if seal is None:
        raise RunError("it is not signed", hint=_OLDER)
    try:
        manifest = decode(_manifests, data, "it cannot be read")
        vouched = decode(_seals, seal, "its signature cannot be read")
    except ProtocolError as error:
        raise RunError(error.message, hint=_OLDER) from error
    if manifest.run != run:
        raise RunError(f"it belongs to run {manifest.run}", hint="Give the run that it belongs to.")
    if vouched.node not in may_sign:
        raise RunError("it is signed by nobody of this cluster", hint="Take one that was saved here.")
    statement = _statement(manifest.run, manifest.step, fingerprint(data))
    if not verify_signature(NodeId(vouched.node), vouched.signature, statement):
        raise RunError("it was changed after it was signed", hint=_OLDER)
    return manifest


def load_manifest(place: Path, run: str, may_sign: Collection[bytes]) -> CheckpointManifest:
    """Of a checkpoint on this machine's disk; RunError with the reason if it does not count."""
    try:
        data = _bounded(place / MANIFEST)
        seal = _bounded(place / SEAL) if (place / SEAL).exists() else None
    except OSError as error:
        raise RunError(f"it cannot be read ({error})", hint=_OLDER) from error
    return read_manifest(data, seal, run, may_sign)


def _bounded(path: Path) -> bytes:
    if path.stat().st_size > LARGEST[path.name]:
        raise RunError(f"its {path.name} is too large", hint=_OLDER)
    return path.read_bytes()


def encode(what: CheckpointManifest | CheckpointSignature) -> bytes:
    """As the file has it."""
    return msgspec.json.encode(what)


# which one counts, and who keeps it


def newest_checkpoint(held: Iterable[HeldCheckpoint], runs: Sequence[str]) -> HeldCheckpoint | None:
    """Of the first of these runs that has any: an agreed one before a provisional one, then the latest."""
    places = {run: place for place, run in enumerate(runs)}
    known = [one for one in held if one.run in places]
    return max(known, key=lambda one: (-places[one.run], one.agreed, one.age), default=None)


def next_copy_target(
    me: bytes, holders: Collection[bytes], candidates: Sequence[bytes], copies: int
) -> bytes | None:
    """Whom to give a copy now. Of those who hold it, one alone gives: all come to the same conclusion."""
    if len(holders) >= copies or me != min(holders, default=b""):
        return None
    return next((node for node in candidates if node not in holders), None)


def _statement(run: str, step: int, manifest: bytes) -> bytes:
    return _PURPOSE + _encoder.encode((run, step, manifest))


_encoder = msgspec.msgpack.Encoder()
_manifests: msgspec.json.Decoder[CheckpointManifest] = msgspec.json.Decoder(CheckpointManifest)
_seals: msgspec.json.Decoder[CheckpointSignature] = msgspec.json.Decoder(CheckpointSignature)
