"""Identity of machines and workers: node keys, certificates, and the trust log of a cluster.

Names are loaded when they are first used. The command line needs some on every start, and only signing and
verifying need the cryptography library. Connections belong in ``transport``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from barnraise.identity.credentials import WORKER_BYTES, WorkerCredentials
    from barnraise.identity.delegation import WorkerIdentity, anchor, delegate, read_worker
    from barnraise.identity.keys import NodeKey, verify_signature
    from barnraise.identity.node_id import NodeId
    from barnraise.identity.trust import (
        AdmitMember,
        FoundCluster,
        RevokeMember,
        Role,
        RotateKey,
        SignedEntry,
        TrustedMember,
        TrustLog,
        decode_entry,
        encode_entry,
    )

_HOMES = {
    "credentials": ("WORKER_BYTES", "WorkerCredentials"),
    "delegation": ("WorkerIdentity", "anchor", "delegate", "read_worker"),
    "keys": ("NodeKey", "verify_signature"),
    "node_id": ("NodeId",),
    "trust": (
        "AdmitMember",
        "FoundCluster",
        "TrustedMember",
        "RevokeMember",
        "RotateKey",
        "Role",
        "SignedEntry",
        "TrustLog",
        "decode_entry",
        "encode_entry",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "WORKER_BYTES",
    "AdmitMember",
    "FoundCluster",
    "NodeId",
    "NodeKey",
    "RevokeMember",
    "Role",
    "RotateKey",
    "SignedEntry",
    "TrustLog",
    "TrustedMember",
    "WorkerCredentials",
    "WorkerIdentity",
    "anchor",
    "decode_entry",
    "delegate",
    "encode_entry",
    "read_worker",
    "verify_signature",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
