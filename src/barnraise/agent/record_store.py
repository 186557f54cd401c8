"""Compare-and-set of records in the cluster's key-value store: of runs, and of jobs."""

from __future__ import annotations

import secrets

from barnraise.agent.context import AgentContext
from barnraise.agent_client.kv_messages import CompareAndSet, KvDenied, Namespace
from barnraise.core.errors import MembershipError

_PATIENCE_S = 10.0


class RecordStore:
    """Records of one kind in the key-value store, which needs a quorum. ``kind``: the word for people."""

    def __init__(self, context: AgentContext, scope: Namespace, kind: str) -> None:
        self._context = context
        self._scope = scope
        self._kind = kind
        self._client = secrets.token_bytes(16)
        self._serial = 0

    async def compare_set(self, name: str, expected: bytes, desired: bytes) -> bytes:
        """Write a record with compare-and-set, and return the stored value."""
        self._serial += 1
        operation = CompareAndSet(self._scope, self._client, self._serial, b"", name, expected, desired)
        result = await self._context.kv.request(operation, _PATIENCE_S)
        if isinstance(result, KvDenied):
            raise MembershipError(
                f"the cluster cannot store the {self._kind} now: {result.message}", hint=result.hint
            )
        return result.value or b""
