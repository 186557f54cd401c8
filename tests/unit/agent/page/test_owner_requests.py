"""Requests between owners' agents: the rules that answer or reject them."""

from __future__ import annotations

import pytest

from barnraise.agent.page.messages import OwnerRequest, OwnerResponse, decode, encode
from barnraise.agent.page.owner_requests import refuse_owner_request
from barnraise.agent_client.cluster_requests import (
    CheckRequest,
    LeaveRequest,
    LimitsRequest,
    OpenPageRequest,
    PairRequest,
    PauseMachineRequest,
    RotateKeyRequest,
    ShutdownRequest,
    StatusRequest,
    UnpairRequest,
    decode_request,
)
from barnraise.agent_client.cluster_requests import encode as encode_request
from barnraise.agent_client.history.requests import HistoryListRequest, HistoryPartRequest, RecordRequest
from barnraise.agent_client.notifications.requests import (
    AddTargetRequest,
    ListTargetsRequest,
    RemoveTargetRequest,
    TargetTestRequest,
)
from barnraise.agent_client.notifications.targets import DesktopTarget
from barnraise.agent_client.run_requests import (
    AcceptRunRequest,
    RunsRequest,
    SignersRequest,
    StopRunRequest,
    WatchRequest,
)
from barnraise.core.errors import ProtocolError


@pytest.mark.parametrize(
    "request_",
    [
        *(StatusRequest(), RunsRequest(), CheckRequest(), StopRunRequest("train-1")),
        *(WatchRequest(run="train-1"), HistoryListRequest(), HistoryPartRequest("train-k3f9", b"x" * 32)),
    ],
)
def test_requests_that_the_page_needs_are_answered(request_: StatusRequest) -> None:
    assert refuse_owner_request(request_) is None


@pytest.mark.parametrize(
    "request_",
    [
        *(
            LimitsRequest(),
            PauseMachineRequest("h0", True),
            PairRequest(),
            LeaveRequest(),
            ShutdownRequest(),
            RotateKeyRequest(),
            UnpairRequest("h0"),
        ),
        *(OpenPageRequest(), AcceptRunRequest("train-1", yes=True), SignersRequest("train-1")),
        RecordRequest("train-1", 0, 0, b""),
        *(AddTargetRequest(DesktopTarget()), ListTargetsRequest(), RemoveTargetRequest("webhook")),
        TargetTestRequest(),
    ],
)
def test_requests_that_only_the_machines_user_may_send_are_refused(request_: PairRequest) -> None:
    assert refuse_owner_request(request_) is not None


@pytest.mark.parametrize("run", ["../../etc", "a/b", "..", "A", "a\n", "a\x00"])
def test_name_of_a_run_cannot_leave_its_folder(run: str) -> None:
    with pytest.raises(ProtocolError):
        decode_request(encode_request(HistoryPartRequest(run, b"x" * 32)))


def test_messages_are_bounded() -> None:
    for message in (OwnerRequest(1, b"x"), OwnerResponse(1, b"x", "run", "no", "hint")):
        assert decode(encode(message)[1:]) == message
    for message in (OwnerRequest(1, bytes(100_000)), OwnerResponse(1, code="x" * 100)):
        with pytest.raises(ProtocolError):
            decode(encode(message)[1:])
