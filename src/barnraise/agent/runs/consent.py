"""Offer of a run: everything that the user of this machine is asked, and whether the user agreed.

Before the user agrees, only the list of the run's files is fetched, and it stays in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from barnraise.agent.audit_trail import order_digest
from barnraise.agent_client.run_options import DataSet
from barnraise.agent_client.run_requests import AcceptRunResponse, DataRow
from barnraise.artifacts import FolderManifest
from barnraise.environments.build_plan import environment_source
from barnraise.identity import NodeId
from barnraise.runs.record import RunRecord, RunSpec

MAX_WAITING = 32  # runs that may wait for the user's answer at once
_MAX_LISTED = 500
_AGREED = "accepted"  # file in the run's directory
_SANDBOXED, _UNCONFINED = "sandbox", "no sandbox"


class OfferedFolder(NamedTuple):
    """Files of a run, without their contents. ``files``: the command's own, then the largest."""

    files: tuple[tuple[str, int], ...] = ()
    file_count: int = 0
    total_bytes: int = 0
    source: str = ""  # the file that packages are installed from; empty: none


def summarize(manifest: FolderManifest, spec: RunSpec) -> OfferedFolder:
    """Return what a person is shown of a folder; its size does not depend on the number of files."""
    named = set(spec.program.command)
    ordered = sorted(manifest.files, key=lambda entry: (entry.path not in named, -entry.size, entry.path))
    tops = [entry.path for entry in manifest.files if "/" not in entry.path]
    has_image = bool(spec.options.container)
    return OfferedFolder(
        tuple((entry.path, entry.size) for entry in ordered[:_MAX_LISTED]),
        len(manifest.files),
        manifest.size,
        "" if has_image else environment_source(tops, spec.options.environment),
    )


def has_agreed(home: Path) -> bool:
    """Tell whether this machine's user agreed to the active run in this directory."""
    return (home / _AGREED).exists()


def note_agreement(home: Path, *, is_sandboxed: bool) -> None:
    """Note that the user agreed, so that a restarted agent does not ask again."""
    (home / _AGREED).write_text(_SANDBOXED if is_sandboxed else _UNCONFINED, encoding="ascii")


def agreed_to_sandbox(home: Path) -> bool:
    """Tell whether the user agreed to a run in a sandbox, and not expressly to one without."""
    try:
        return (home / _AGREED).read_text(encoding="ascii") != _UNCONFINED
    except OSError:
        return True


def end_agreement(home: Path) -> None:
    """Forget the consent, which does not extend to a later run of the same name."""
    (home / _AGREED).unlink(missing_ok=True)


def _data_row(data: DataSet) -> DataRow:
    version = "" if data.version is None else f"{data.version.repository}@{data.version.revision}"
    return DataRow(data.name, data.path, data.files, data.bytes, data.is_model, version)


def describe_offer(
    record: RunRecord, spec: RunSpec, folder: OfferedFolder, values: Mapping[str, str]
) -> AcceptRunResponse:
    """Return everything about a run that the user of this machine agrees to.

    ``values``: of the variables that the sender set.
    """
    return AcceptRunResponse(
        run=spec.run,
        order=order_digest(record),
        by_id=NodeId(spec.by).short,
        command=spec.program.command,
        files=folder.files,
        file_count=folder.file_count,
        bytes=folder.total_bytes,
        variables=(*spec.program.settings, *values.items()),
        data=tuple(map(_data_row, spec.program.data)),
        image=spec.options.container,
        packages=folder.source,
        package_count=spec.program.packages,
    )
