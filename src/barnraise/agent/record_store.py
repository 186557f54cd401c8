"""Compare-and-set of records in the cluster's key-value store: of runs, and of jobs.

The coordinator deletes the keys of records that it has forgotten. Without that, the store would be full after
some thousand runs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable

from barnraise.agent.context import AgentContext
from barnraise.agent_client.kv_messages import CompareAndSet, DeleteKey, KvDenied, Namespace
from barnraise.core.errors import MembershipError

MAX_UNWANTED = 4096  # a coordinator has nearly always deleted the older ones
_PATIENCE_S = 10.0
_DELETE_S = 5.0  # between two looks for keys to delete
_DELETED_AT_ONCE = 64


class RecordStore:
    """Records of one kind in the key-value store, which needs a quorum.

    ``kind``: the word for people. ``free_space``: what a person can do if the records fill the namespace.
    """

    def __init__(self, context: AgentContext, scope: Namespace, kind: str, free_space: str) -> None:
        self._context = context
        self._scope = scope
        self._kind = kind
        self._free_space = free_space
        self._client = secrets.token_bytes(16)
        self._serial = 0
        # Deletions are a client of their own: a late one must not be newer than a write.
        self._deleter = secrets.token_bytes(16)
        self._deletions = 0
        self._unwanted: dict[str, None] = {}  # in the order in which they were forgotten

    async def compare_set(self, name: str, expected: bytes, desired: bytes) -> bytes:
        """Write a record with compare-and-set, and return the stored value."""
        self._serial += 1
        operation = CompareAndSet(self._scope, self._client, self._serial, b"", name, expected, desired)
        result = await self._context.kv.request(operation, _PATIENCE_S)
        if isinstance(result, KvDenied):
            if result.reason == "full":
                raise MembershipError(
                    f"the cluster cannot store the {self._kind} now: "
                    f"its records of {self._kind}s take all of their space",
                    hint=self._free_space,
                )
            raise MembershipError(
                f"the cluster cannot store the {self._kind} now: {result.message}", hint=result.hint
            )
        return result.value or b""

    def forget(self, names: Iterable[str]) -> None:
        """Note that these records are not needed any more, so that a coordinator deletes their keys."""
        for name in names:
            self._unwanted.pop(name, None)
            self._unwanted[name] = None
        while len(self._unwanted) > MAX_UNWANTED:
            del self._unwanted[next(iter(self._unwanted))]

    def reset(self) -> None:
        """Forget the keys of the old cluster."""
        self._unwanted.clear()

    async def delete_forgotten(self, is_needed: Callable[[str], bool]) -> None:
        """Delete keys of forgotten records while this machine coordinates, until cancelled.

        ``is_needed``: whether a key must stay after all, as another record has its name.
        """
        while True:
            await asyncio.sleep(_DELETE_S)
            if self._unwanted and self._coordinates():
                await self.delete_some(is_needed)

    async def delete_some(self, is_needed: Callable[[str], bool]) -> None:
        """Delete some keys of forgotten records. A repeated deletion changes nothing."""
        for name in list(self._unwanted)[:_DELETED_AT_ONCE]:
            if not is_needed(name):
                self._deletions += 1
                operation = DeleteKey(self._scope, self._deleter, self._deletions, b"", name)
                if isinstance(await self._context.kv.request(operation, _PATIENCE_S), KvDenied):
                    return  # it is tried again later
            self._unwanted.pop(name, None)

    def _coordinates(self) -> bool:
        """Tell whether this machine coordinates, and a quorum confirms its view."""
        now, member = asyncio.get_running_loop().time(), self._context.member
        decides = member.quorum_status(now).decides and member.is_current(now)
        return decides and member.coordinator(now)[0] == self._context.me.raw
