"""How a working folder and data sets get from one machine onto many: packed, by hash, each byte sent once.

May import ``local``, ``transport``, ``identity`` and ``core``; never torch.
"""

from barnraise.shipping.changes import changed_since
from barnraise.shipping.collecting import Collected, collect
from barnraise.shipping.ignoring import RESULTS
from barnraise.shipping.manifest import PIECE, FileEntry, Limits, Manifest, decode_manifest, encode_manifest
from barnraise.shipping.packing import Packed, pack
from barnraise.shipping.results import (
    data_limits,
    folder_limits,
    pack_changes,
    read_files,
    store_directory,
    unpack_into,
)
from barnraise.shipping.store import Store

__all__ = [
    "PIECE",
    "RESULTS",
    "Collected",
    "FileEntry",
    "Limits",
    "Manifest",
    "Packed",
    "Store",
    "changed_since",
    "collect",
    "data_limits",
    "decode_manifest",
    "encode_manifest",
    "folder_limits",
    "pack",
    "pack_changes",
    "read_files",
    "store_directory",
    "unpack_into",
]
