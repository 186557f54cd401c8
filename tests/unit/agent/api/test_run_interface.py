"""Requests that the local interface of a run accepts and rejects."""

from __future__ import annotations

import pytest

from barnraise.agent.api.run_interface import refuse_request
from barnraise.agent_client.cluster_requests import (
    AnyAgentRequest,
    CleanRequest,
    JoinClusterRequest,
    LeaveRequest,
    PairRequest,
    PskRequest,
    ShutdownRequest,
    StatusRequest,
    UnpairRequest,
)
from barnraise.agent_client.kv_messages import (
    LOBBY,
    ClusterRequest,
    KvRequest,
    Namespace,
    PushToQueue,
    ReadQueue,
    SetKey,
)
from barnraise.agent_client.metrics.requests import HealthRequest
from barnraise.agent_client.notifications.requests import AddTargetRequest, ListTargetsRequest
from barnraise.agent_client.notifications.targets import DesktopTarget
from barnraise.agent_client.queue.requests import ChangeJobsRequest, ListJobsRequest
from barnraise.agent_client.run_options import RunProgram
from barnraise.agent_client.run_requests import (
    AcceptRunRequest,
    FailingRequest,
    FetchCheckpointRequest,
    GraphRequest,
    GroupRequest,
    NewestCheckpointRequest,
    ResultsRequest,
    ResumeRunRequest,
    RolesRequest,
    RunsRequest,
    SignersRequest,
    SignRequest,
    StartRunRequest,
    StopRunRequest,
    WatchRequest,
)

RUN, OTHER, EARLIER = "train-abcd", "other-abcd", "train-aaaa"


def set_key(run: str, generation: int = 1) -> KvRequest:
    return KvRequest(SetKey(Namespace(run, generation), bytes(16), 1, b"", "key", b"value"), 5.0)


def of_journal(kind: type, *fields: object, name: str = "default", generation: int = LOBBY) -> KvRequest:
    return KvRequest(kind(Namespace(name, generation), bytes(16), 1, b"", "ab" * 16, *fields), 5.0, True)


@pytest.mark.parametrize(
    "request_",
    [
        ClusterRequest(),
        HealthRequest(),
        of_journal(PushToQueue, b"{}"),
        of_journal(ReadQueue, 0),
        GraphRequest(),
        set_key(RUN),
        GroupRequest(RUN, 0, 1),
        FailingRequest(RUN, 0, 1),
        SignRequest(RUN, 0, 1, 3, bytes(32)),
        NewestCheckpointRequest(RUN, earlier=True),
        RolesRequest(RUN),
        SignersRequest(RUN),
        SignersRequest(EARLIER),
        FetchCheckpointRequest(EARLIER, 3),
    ],
    ids=lambda request: type(request).__name__,
)
def test_refuse_request_of_own_run_is_accepted(request_: AnyAgentRequest) -> None:
    assert refuse_request(RUN, (EARLIER,), request_) is None


@pytest.mark.parametrize(
    "request_",
    [
        PskRequest("owner"),
        PairRequest("owner"),
        JoinClusterRequest("7-word-word"),
        UnpairRequest("pc"),
        StatusRequest(),
        CleanRequest(),
        LeaveRequest(),
        ShutdownRequest(),
        AddTargetRequest(DesktopTarget()),
        ListTargetsRequest(),
        StartRunRequest(program=RunProgram(folder=bytes(32), command=("train.py",))),
        ResumeRunRequest(run=RUN),
        AcceptRunRequest(OTHER, yes=True),
        AcceptRunRequest(RUN, yes=True),
        StopRunRequest(RUN),
        RunsRequest(),
        ListJobsRequest(),
        ChangeJobsRequest(action="cancel", jobs=(1,)),
        set_key("@queue", LOBBY),
        ResultsRequest(RUN),
        GraphRequest(on=("pc",)),
        set_key(OTHER),
        set_key("@runs", LOBBY),
        of_journal(SetKey, b"v"),
        of_journal(PushToQueue, b"{}", name="@runs"),
        of_journal(PushToQueue, b"{}", name=RUN, generation=1),
        WatchRequest(run=RUN),
        WatchRequest(run=OTHER),
        RolesRequest(OTHER),
        GroupRequest(OTHER, 0, 1),
        SignRequest(OTHER, 0, 1, 3, bytes(32)),
        SignRequest(EARLIER, 0, 1, 3, bytes(32)),
        FetchCheckpointRequest(OTHER, 3),
    ],
    ids=lambda request: type(request).__name__,
)
def test_refuse_request_of_person_or_of_other_run_has_reason(request_: AnyAgentRequest) -> None:
    """A script asks for a key of the cluster, accepts another run, or writes the records of runs."""
    assert refuse_request(RUN, (EARLIER,), request_)
