"""Distribution of folders and data sets to many machines: packed, by hash, each byte sent once.

``packing`` reads and writes folders, ``store`` keeps contents, ``transfer`` moves pieces between agents.
Connections belong in ``agent``. Never imports torch.
"""

from barnraise.artifacts.packing.changes import changed_since, drop_unchanged
from barnraise.artifacts.packing.ignore_rules import RESULTS
from barnraise.artifacts.packing.pack import PackedFolder, pack
from barnraise.artifacts.packing.results import (
    RESULTS_STAY,
    data_limits,
    folder_limits,
    pack_changes,
    read_files,
    store_directory,
    unpack_into,
)
from barnraise.artifacts.store.gc import (
    CollectedGarbage,
    Garbage,
    collect,
    find_garbage,
    remove_garbage,
    stored_manifests,
)
from barnraise.artifacts.store.manifest import (
    PIECE,
    FileEntry,
    FolderLimits,
    FolderManifest,
    decode_manifest,
    encode_manifest,
)
from barnraise.artifacts.store.store import ArtifactStore

__all__ = [
    "PIECE",
    "RESULTS",
    "RESULTS_STAY",
    "ArtifactStore",
    "CollectedGarbage",
    "FileEntry",
    "FolderLimits",
    "FolderManifest",
    "Garbage",
    "PackedFolder",
    "changed_since",
    "collect",
    "data_limits",
    "decode_manifest",
    "drop_unchanged",
    "encode_manifest",
    "find_garbage",
    "folder_limits",
    "pack",
    "pack_changes",
    "read_files",
    "remove_garbage",
    "store_directory",
    "stored_manifests",
    "unpack_into",
]
