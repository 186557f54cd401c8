"""Program and options of a run, as the user asks for them. Pure.

The request to the agent and the signed run spec both embed `RunProgram` and `RunOptions`. A decoder trusts
neither, so each field has a limit.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_MACHINES = 256
MAX_TITLE = 200
MAX_IMPORTS = 512
MAX_IMPORT_NAME = 128
MAX_FINDING = 600
DATA_NAME = r"^[A-Za-z][A-Za-z0-9_]{0,39}\Z"
_MODEL_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
# As Hugging Face's own rule, which also keeps the names of two repositories from having one folder.
MODEL_REPOSITORY = rf"^(?!.*(?:--|\.\.)){_MODEL_WORD}(?:/{_MODEL_WORD})?\Z"
MODEL_REVISION = rf"^(?!.*\.\.){_MODEL_WORD}(?:/{_MODEL_WORD}){{0,4}}\Z"
MODEL_COMMIT = r"^[0-9a-f]{40}\Z"

Word = Annotated[str, Meta(max_length=200)]
Argument = Annotated[str, Meta(max_length=32768)]
Digest = Annotated[bytes, Meta(max_length=32)]
Variables = Annotated[tuple[tuple[Word, Argument], ...], Meta(max_length=256)]
ImportNames = Annotated[
    tuple[Annotated[str, Meta(max_length=MAX_IMPORT_NAME)], ...], Meta(max_length=MAX_IMPORTS)
]
Finding = Annotated[str, Meta(max_length=MAX_FINDING)]


class ModelVersion(msgspec.Struct, frozen=True, array_like=True):
    """Version of a model in a Hugging Face cache. The words of a run spec are only a name for its files."""

    repository: Annotated[str, Meta(pattern=MODEL_REPOSITORY)]
    revision: Annotated[str, Meta(pattern=MODEL_REVISION, max_length=200)]
    commit: Annotated[str, Meta(pattern=MODEL_COMMIT)]


class DataSet(msgspec.Struct, frozen=True, array_like=True):
    """Data of a run: shipped if it has a manifest, otherwise each machine has it at this path.

    ``files`` and ``bytes``: what is shipped, as a guest's user is told. A machine rejects more than that.
    ``version``: the model's name in the Hugging Face cache of the machine that started the run.
    """

    name: Annotated[str, Meta(pattern=DATA_NAME)]
    manifest: Digest = b""
    path: Argument = ""
    files: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    is_model: bool = False
    version: ModelVersion | None = None

    @property
    def variable(self) -> str:
        """Return the variable that tells the script where the files are."""
        return f"BARNRAISE_{'MODEL' if self.is_model else 'DATA'}_{self.name.upper()}"


class ScriptImports(msgspec.Struct, frozen=True, kw_only=True):
    """Packages that the script imports from outside its folder, and errors that prevent it from running."""

    required: ImportNames = ()
    optional: ImportNames = ()
    cuda: Finding | None = None
    syntax: Finding | None = None


class RunProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Files and command of a run.

    ``command``: the arguments of Python. ``folder``: the manifest of the folder that every machine gets.
    """

    command: Annotated[tuple[Argument, ...], Meta(min_length=1, max_length=1024)]
    folder: Digest
    data: Annotated[tuple[DataSet, ...], Meta(max_length=64)] = ()
    needs: ScriptImports = ScriptImports()
    # Packages that each machine installs, as a guest's user is told; the guest's machine rejects more.
    packages: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    # Variables of Barnraise itself. They are in the record of the run, so none is secret.
    settings: Variables = ()

    @property
    def manifests(self) -> tuple[bytes, ...]:
        """Return the manifests of all that is shipped."""
        return (self.folder, *(data.manifest for data in self.data if data.manifest))


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a run. The command line has an option for each field."""

    title: Annotated[str, Meta(max_length=MAX_TITLE)] = ""
    per_node: Annotated[int, Meta(ge=0, le=64)] = 0  # workers on each machine; 0: one for each device
    min_nodes: Annotated[int, Meta(ge=1, le=MAX_MACHINES)] = 1
    wait_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    restarts: Annotated[int, Meta(ge=0, le=1000)] = 3
    environment: Literal["auto", "sync", "agent"] = "auto"
    engine: Literal["auto", "barnraise", "gloo", "nccl"] = "auto"
    fabric: Literal["untrusted", "trusted"] = "untrusted"
    quiet: bool = False
    nice: Annotated[int, Meta(ge=0, le=19)] = 0
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0  # of each worker; 0: no limit
    container: Word = ""
    sandbox: bool = False  # on every machine; a guest's machine uses one anyway
