"""This machine's agent, as far as checkpoints need it: it signs them, knows who may, and brings others'."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import Told, decode_told, encode
from barnraise.agent_client.run_requests import (
    FetchCheckpointRequest,
    FetchCheckpointResponse,
    NewestCheckpointRequest,
    NewestCheckpointResponse,
    RunQuestion,
    SignersRequest,
    SignersResponse,
    SignRequest,
    SignResponse,
)
from barnraise.core.errors import AgentError
from barnraise.core.units import format_size
from barnraise.runs.checkpoint_manifest import CheckpointSignature

log = logging.getLogger("barnraise.checkpoint")

_ANSWER_S = 30.0
_SAY_S = 10.0

T = TypeVar("T", bound=Told)


class CheckpointSigner(Protocol):
    """What checkpoints need of the agent. Every method may raise a BarnraiseError, from any thread."""

    def seal(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        """The machine's signature under a manifest of this worker's run."""

    def signers(self, run: str) -> Collection[bytes]:
        """Whose signature counts for a run."""

    def newest(
        self, passing_over: Collection[tuple[str, int]], awaiting: Sequence[bytes]
    ) -> NewestCheckpointResponse:
        """The newest of this run, and of those that it goes on with, on any machine in reach; and which of
        those that are awaited are not."""

    def bring(self, run: str, step: int) -> None:
        """Until it is on this machine's disk."""


class AgentCheckpointSigner:
    """Asks over the local interface; each question on a connection of its own."""

    def __init__(self, state: Path, run: str, local_rank: int = 0, start: int = 0) -> None:
        self._state = state
        self._run = run
        self._local_rank = local_rank
        self._start = start

    def seal(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        question = SignRequest(self._run, self._local_rank, self._start, step, fingerprint)
        told = self._ask(question, SignResponse, _ANSWER_S)
        return CheckpointSignature(told.node, told.signature)

    def signers(self, run: str) -> Collection[bytes]:
        return self._ask(SignersRequest(run), SignersResponse, _ANSWER_S).nodes

    def newest(
        self, passing_over: Collection[tuple[str, int]], awaiting: Sequence[bytes]
    ) -> NewestCheckpointResponse:
        question = NewestCheckpointRequest(self._run, True, tuple(passing_over), tuple(awaiting))
        return self._ask(question, NewestCheckpointResponse, _ANSWER_S)

    def bring(self, run: str, step: int) -> None:
        while not (
            told := self._ask(FetchCheckpointRequest(run, step, _SAY_S), FetchCheckpointResponse, _ANSWER_S)
        ).here:
            done, size = format_size(told.done_bytes), format_size(told.all_bytes)
            log.warning("waiting for the checkpoint of step %d: %s of %s are here", step, done, size)

    def _ask(self, question: RunQuestion, expected: type[T], timeout_s: float) -> T:
        with ListenerClient.connect(self._state) as client:
            told = decode_told(client.ask(encode(question), timeout_s))
        if not isinstance(told, expected):
            raise AgentError(f"the agent answered {type(told).__name__} to a {type(question).__name__}")
        return told
