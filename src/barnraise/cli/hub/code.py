"""The code of a hub's run: fetched by hash, shown to the person before it starts, then unpacked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from barnraise.artifacts import PIECE, ArtifactStore, FileEntry, FolderManifest, folder_limits, read_files
from barnraise.artifacts.store.manifest import MOST_ENCODED
from barnraise.cli.consent import ClusterReach, OfferedRun
from barnraise.cli.machine.identity import machine_key
from barnraise.core.config import Settings, state_directory
from barnraise.core.errors import HubError, RunEnvironmentError
from barnraise.environments.script_imports import scan_imports
from barnraise.hub.client.client import HubClient
from barnraise.hub.mirror.blob_fetcher import ASK_THE_SENDER, MOST_CODE_BYTES, files_of
from barnraise.hub.protocol.messages import CodeDescription, RunDescription, decode_message
from barnraise.membership.storage import FILE_NAME, MembershipStorage


class OfferedCode(NamedTuple):
    """Code that the hub's signed description names."""

    description: RunDescription
    code: CodeDescription
    manifest: FolderManifest


def look(client: HubClient, description: RunDescription, workspace: Path, settings: Settings) -> OfferedCode:
    """Fetch the list of files, without the files themselves."""
    if description.code is None:
        raise HubError(f"the hub of {description.name} has no code to run", hint=ASK_THE_SENDER)
    code = decode_message(CodeDescription, client.fetch_bytes(description.code, MOST_CODE_BYTES, workspace))
    listed = client.fetch_bytes(code.manifest, MOST_ENCODED, workspace)
    return OfferedCode(description, code, files_of(code, listed, folder_limits(settings)))


def offered_run(offered: OfferedCode, reach: ClusterReach, machines: Sequence[str] = ()) -> OfferedRun:
    """Return what the person at this machine is asked about, before any file is fetched.

    ``machines``: where the code would start, if not on this machine alone.
    """
    where = f"{', '.join(machines)} (this cluster)" if machines else "this machine"
    description, code, manifest = offered
    files = sorted(manifest.files, key=lambda entry: (entry.path != code.entry, -entry.size))
    notes = ["Agree only if you trust the sender of the invite."]
    if description.store:
        notes.insert(0, f"Files and models may also come from {description.store}, checked by their hashes.")
    return OfferedRun(
        heading=f"The run {description.name} of the hub {description.hub[:9]} would start on {where}:",
        command=(code.entry, *code.arguments),
        files=[(entry.path, entry.size) for entry in files],
        file_count=len(files),
        file_bytes=manifest.size,
        reach=reach,
        notes=notes,
    )


def cluster_reach(settings: Settings) -> ClusterReach:
    """Return the cluster that a program on this machine can reach, also while no agent runs."""
    directory = state_directory(settings)
    if not (directory / FILE_NAME).exists():
        return ClusterReach()
    storage = MembershipStorage(directory)
    try:
        log = storage.log()
    finally:
        storage.close()
    me = machine_key(settings).id
    if log is None:
        return ClusterReach()
    others = [f"{member.name} ({node.short})" for node, member in log.members.items() if node != me]
    return ClusterReach(log.role(me) or "", others)


def lay_out(client: HubClient, offered: OfferedCode, workspace: Path) -> Path:
    """Fetch every file, check it against the list that was shown, and return the folder to run in."""
    store = ArtifactStore(workspace / "store")
    store.check_room(2 * offered.manifest.size)
    objects = offered.manifest.objects().items()
    for sha256, (_, entry) in zip(offered.code.contents, objects, strict=True):
        path = workspace / sha256
        client.fetch(sha256, path, size=entry.size)
        _keep(store, entry, path)
        path.unlink()
    target = workspace / "code"
    store.unpack(offered.manifest, target)
    _check_needs(store, offered)
    return target


def _keep(store: ArtifactStore, entry: FileEntry, path: Path) -> None:
    with path.open("rb") as file:
        for index in range(len(entry.pieces)):
            store.write_piece(entry, index, file.read(PIECE))


def _check_needs(store: ArtifactStore, offered: OfferedCode) -> None:
    """Check which imports of the script this Python lacks, before the script fails halfway."""
    sources = read_files(store, offered.manifest, lambda path: path.endswith(".py"))
    needs = scan_imports(sources, offered.code.entry)
    missing = list(_missing(needs.required))
    if missing:
        raise RunEnvironmentError(
            f"the script needs {', '.join(missing)}, and this Python has no such package",
            hint="Ask its author which packages provide these modules. Install them, then join again.",
        )


def _missing(names: Iterable[str]) -> Iterable[str]:
    tops = dict.fromkeys(name.partition(".")[0] for name in names)
    return (top for top in tops if find_spec(top) is None)
