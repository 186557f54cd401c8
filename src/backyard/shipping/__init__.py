"""How a working folder and data sets get from one machine onto many: packed, by hash, each byte sent once.

May import ``local``, ``transport``, ``identity`` and ``core``; never torch.
"""

from backyard.shipping.changes import changed_since
from backyard.shipping.collecting import Collected, collect
from backyard.shipping.ignoring import RESULTS
from backyard.shipping.manifest import PIECE, FileEntry, Limits, Manifest, decode_manifest, encode_manifest
from backyard.shipping.packing import Packed, pack
from backyard.shipping.results import (
    data_limits,
    folder_limits,
    pack_changes,
    read_files,
    store_directory,
    unpack_into,
)
from backyard.shipping.store import Store

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
