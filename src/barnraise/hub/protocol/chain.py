"""Signatures of a run's chain: the run's hub signs each step, and members of its regions verify them. Pure.

A region answers its members with a key of its own. Without these signatures it could give them another model
than the run's. It passes on the steps as the hub above signed them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec

from barnraise.core.errors import HubError
from barnraise.hub.protocol.messages import VersionStep
from barnraise.identity.keys import NodeKey, verify_signature
from barnraise.identity.node_id import NodeId

_DOMAIN = "barnraise hub version 1"


def sign_step(key: NodeKey, step: VersionStep) -> VersionStep:
    """Return the step with a signature of the run's hub."""
    signature = base64.urlsafe_b64encode(key.sign(_statement(key.id, step))).decode().rstrip("=")
    return msgspec.structs.replace(step, signature=signature)


def check_chain(steps: Sequence[VersionStep], after: int | None, root: NodeId) -> None:
    """Raise HubError unless the run's hub signed each step, and the steps lead forwards without a gap.

    ``after``: the version that this machine has; None if it has none.
    """
    version = after
    for step in steps:
        signature = base64.urlsafe_b64decode(f"{step.signature}==")
        if not verify_signature(root, signature, _statement(root, step)):
            raise HubError(f"the run's hub did not sign version {step.version} of this region", hint=_REGION)
        if step.kind == "delta" and (version is None or step.version != version + 1):
            raise HubError(f"this region leaves out a version before {step.version}", hint=_REGION)
        if step.kind == "base" and version is not None and step.version < version:
            raise HubError(f"this region goes back from version {version}", hint=_REGION)
        version = step.version


def _statement(root: NodeId, step: VersionStep) -> bytes:
    return msgspec.msgpack.encode(
        (_DOMAIN, root.raw, step.kind, step.version, step.sha256, step.size, step.codec)
    )


_REGION = "Join again with the same invite, and tell the run's owner about this region."
