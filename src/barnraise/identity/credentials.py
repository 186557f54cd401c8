"""Credentials of one incarnation of a worker or agent. Holding them needs no cryptography library."""

from __future__ import annotations

import msgspec

WORKER_BYTES = 16


class WorkerCredentials(msgspec.Struct, frozen=True):
    """Certificate and key of one worker, made by ``delegate``. They do not contain the node key."""

    certificate_pem: bytes
    key_pem: bytes
    worker: bytes
    run: str
    node: bytes

    def __repr__(self) -> str:
        return f"WorkerCredentials(worker={self.worker.hex()}, run={self.run!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("worker", self.worker.hex()), ("run", self.run)]
