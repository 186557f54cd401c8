"""Client of the local agent for checkpoints: signs them, lists valid signers, and fetches them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import AgentResponse, decode_response, encode
from barnraise.agent_client.run_requests import (
    FetchCheckpointRequest,
    FetchCheckpointResponse,
    NewestCheckpointRequest,
    NewestCheckpointResponse,
    RunRequest,
    SignersRequest,
    SignersResponse,
    SignRequest,
    SignResponse,
)
from barnraise.core.errors import AgentError
from barnraise.core.units import format_size
from barnraise.runs.checkpoint_manifest import CheckpointSignature

log = logging.getLogger("barnraise.checkpoint")

_REQUEST_S = 30.0
_REPORT_S = 10.0

T = TypeVar("T", bound=AgentResponse)


class CheckpointSigner(Protocol):
    """Interface to the agent. Every method may raise BarnraiseError, and may be called from any thread."""

    def sign(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        """Return this machine's signature of a manifest of this worker's run."""

    def signers(self, run: str) -> Collection[bytes]:
        """Return the node ids whose signatures are valid for a run."""

    def newest(
        self, passing_over: Collection[tuple[str, int]], awaiting: Sequence[bytes]
    ) -> NewestCheckpointResponse:
        """Return the newest checkpoint on any reachable machine, and which awaited machines are unreachable.

        Checkpoints of the runs that this run resumes count as well; those in ``passing_over`` do not.
        """

    def fetch(self, run: str, step: int, parts: Collection[int] = ()) -> None:
        """Block until the checkpoint is on this machine's disk. ``parts``: of one in parts only these."""


class AgentCheckpointSigner:
    """Implementation over the agent's local API, with one connection per request."""

    def __init__(self, state: Path, run: str, local_rank: int = 0, start: int = 0) -> None:
        self._state = state
        self._run = run
        self._local_rank = local_rank
        self._start = start

    def sign(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        request = SignRequest(self._run, self._local_rank, self._start, step, fingerprint)
        response = self._ask(request, SignResponse, _REQUEST_S)
        return CheckpointSignature(response.node, response.signature)

    def signers(self, run: str) -> Collection[bytes]:
        return self._ask(SignersRequest(run), SignersResponse, _REQUEST_S).nodes

    def newest(
        self, passing_over: Collection[tuple[str, int]], awaiting: Sequence[bytes]
    ) -> NewestCheckpointResponse:
        request = NewestCheckpointRequest(self._run, True, tuple(passing_over), tuple(awaiting))
        return self._ask(request, NewestCheckpointResponse, _REQUEST_S)

    def fetch(self, run: str, step: int, parts: Collection[int] = ()) -> None:
        request = FetchCheckpointRequest(run, step, _REPORT_S, tuple(sorted(parts)))
        while not (response := self._ask(request, FetchCheckpointResponse, _REQUEST_S)).here:
            done, size = format_size(response.done_bytes), format_size(response.all_bytes)
            log.warning("waiting for the checkpoint of step %d: received %s of %s", step, done, size)

    def _ask(self, request: RunRequest, expected: type[T], timeout_s: float) -> T:
        with ListenerClient.connect(self._state) as client:
            response = decode_response(client.ask(encode(request), timeout_s))
        if not isinstance(response, expected):
            raise AgentError(f"the agent answered {type(request).__name__} with {type(response).__name__}")
        return response
