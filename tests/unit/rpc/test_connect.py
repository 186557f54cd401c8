"""Workers connect only with owners' workers, and rows with their addresses are bounded."""

from __future__ import annotations

import time

import pytest

from barnraise.agent_client.run_requests import GuestRow, RolesResponse
from barnraise.core.errors import OperationTimeout, ProtocolError, RunError
from barnraise.rpc import connect as module
from barnraise.rpc.connect import connect, decode_row, encode_row, refusal
from barnraise.rpc.registry import FunctionRegistry
from barnraise.testing import spawn

HERE, OWNER, GUEST = b"\1" * 32, b"\2" * 32, b"\7" * 32


def roles(*, in_run: bool) -> RolesResponse:
    return RolesResponse(here=HERE, owners=(HERE, OWNER), guests=(GuestRow(GUEST, "friend", in_run),))


def test_run_with_a_guest_has_no_remote_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask_roles", lambda settings, run, launched: roles(in_run=True))
    with pytest.raises(RunError, match="friend takes part as a guest, so there are no") as caught:
        connect(FunctionRegistry(), None, 1, 1.0)
    assert "--on" in caught.value.hint


def test_group_with_a_machine_of_a_guest_is_refused_outside_of_runs() -> None:
    known = roles(in_run=False)
    assert refusal(known, [OWNER, HERE]) is None
    assert "friend takes part" in str(refusal(known, [OWNER, GUEST]))
    assert "a machine without a certificate" in str(refusal(known, [b""])), "plaintext proves nothing"


def test_machines_are_not_refused_without_guests_or_agent() -> None:
    assert refusal(None, [b""]) is None
    assert refusal(RolesResponse(here=HERE, owners=(HERE,)), [b""]) is None


def test_start_without_a_group_says_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask_roles", lambda settings, run, launched: None)
    with pytest.raises(RunError, match="needs the workers of a group") as caught:
        connect(FunctionRegistry(), None, 1, 1.0)
    assert "init_process_group" in caught.value.hint


def test_rank_that_does_not_start_is_named_in_time() -> None:
    """The timeout of the group is longer than that of the start."""

    def body(rank: int) -> tuple[int, ...]:
        if rank == 1:
            time.sleep(1.5)
            return ()
        try:
            module._world_of_script(0.3).gather(encode_row(b"address"))
        except OperationTimeout as error:
            return error.late
        return ()

    assert spawn(body, world=2, timeout_s=20) == {0: (1,), 1: ()}


@pytest.mark.parametrize("message", [b"", b"x", bytes(4094)])
def test_row_comes_back_as_it_was(message: bytes) -> None:
    row = encode_row(message)
    assert row.shape == (4096,)
    assert decode_row(bytes(row.numpy())) == message


def test_row_that_is_too_long_is_refused() -> None:
    with pytest.raises(RunError, match="4095 bytes"):
        encode_row(bytes(4095))


@pytest.mark.parametrize("row", [b"", bytes(4095), b"\xff\x0f" + bytes(4094), b"\xff\xff" + bytes(4094)])
def test_malformed_row_is_refused(row: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        decode_row(row)
