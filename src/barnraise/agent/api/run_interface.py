"""Requests that a worker may send to the agent: those of its own run, and no others. Pure.

Each run has a local interface of its own. A script can send anything there, so a request that is not listed
here is rejected.
"""

from __future__ import annotations

from collections.abc import Collection

from barnraise.agent_client.cluster_requests import AnyAgentRequest
from barnraise.agent_client.history.requests import RecordRequest
from barnraise.agent_client.kv_messages import ClusterRequest, KvRequest
from barnraise.agent_client.metrics.requests import HealthRequest, MetricsReport
from barnraise.agent_client.run_requests import (
    DroppedStepsRequest,
    FailingRequest,
    FetchCheckpointRequest,
    GraphRequest,
    GroupRequest,
    NewestCheckpointRequest,
    ProgressRequest,
    RolesRequest,
    SignersRequest,
    SignRequest,
)
from barnraise.kvstore.journals import refuse_journal_operation

_OWN = (
    GroupRequest,
    ProgressRequest,
    FailingRequest,
    DroppedStepsRequest,
    RecordRequest,
    SignRequest,
    NewestCheckpointRequest,
    RolesRequest,
    MetricsReport,
)
_OWN_OR_EARLIER = SignersRequest, FetchCheckpointRequest


def refuse_request(run: str, earlier: Collection[str], request: AnyAgentRequest) -> str | None:
    """Return the reason why workers of this run may not send this request, or None if they may.

    ``earlier``: the runs that this one continues, whose checkpoints it may read.
    """
    match request:
        case ClusterRequest() | HealthRequest():
            return None
        case GraphRequest():
            return "it names machines; a worker asks for those of its run" if request.on else None
        case KvRequest(durable=True):
            # Journals belong to the cluster: a later run continues a sweep.
            return refuse_journal_operation(request.operation)
        case KvRequest():
            scope = request.operation.scope
            return None if scope.run == run else f"the keys of run {scope.run} do not belong to it"
    if isinstance(request, _OWN_OR_EARLIER) and request.run in earlier:
        return None
    if isinstance(request, (*_OWN, *_OWN_OR_EARLIER)):
        return None if request.run == run else f"run {request.run} is another run"
    return "only the commands of this machine's user may send it"
