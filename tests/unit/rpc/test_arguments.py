"""Arguments travel as plain data and tensors, and references keep their places among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from barnraise.core.errors import ProtocolError, RunError
from barnraise.rpc.arguments import decode_arguments, decode_result, encode_arguments, encode_result
from barnraise.rpc.endpoint import RpcEndpoint
from barnraise.rpc.messages import MAX_ARGUMENTS, CallMessage, ReferenceId
from barnraise.rpc.references import RemoteReference
from barnraise.rpc.registry import FunctionRegistry


def references(*identities: ReferenceId) -> list[RemoteReference]:
    endpoint = RpcEndpoint(0, 4, FunctionRegistry())
    return [RemoteReference(endpoint, identity) for identity in identities]


def travel(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    encoded = encode_arguments("f", args, kwargs)
    places = tuple((place, held.identity) for place, held in encoded.references.items())
    message = CallMessage(0, "f", len(args), encoded.names, places)
    body = b"".join(map(bytes, encoded.contents))
    return decode_arguments(message, body, list(encoded.references.values()))


def test_values_come_back_with_their_types() -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    args, kwargs = travel(
        [1, 2.5, "é", None, (1, [2]), {"a": {3}}, 1 << 80, weights.t(), np.arange(3)],
        {"dtype": torch.bfloat16, "empty": torch.empty(0, 2)},
    )
    assert args[:7] == [1, 2.5, "é", None, (1, [2]), {"a": {3}}, 1 << 80]
    assert torch.equal(args[7], weights.t())
    assert args[8].tolist() == [0, 1, 2]
    assert kwargs["dtype"] is torch.bfloat16
    assert kwargs["empty"].shape == (0, 2)


def test_references_keep_their_places() -> None:
    first, second = references(ReferenceId(1, 5), ReferenceId(2, 6))
    args, kwargs = travel([first, "a", "b"], {"x": 1, "table": second})
    assert args == [first, "a", "b"]
    assert kwargs == {"x": 1, "table": second}


def test_value_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(RunError, match=r"argument 2 of f\['model'\] is a Linear, which does not travel"):
        encode_arguments("f", [1, {"model": torch.nn.Linear(1, 1)}], {})
    with pytest.raises(RunError, match="the argument key of f is a function"):
        encode_arguments("f", [], {"key": test_references_keep_their_places})
    with pytest.raises(RunError, match="the result of f is an object"):
        encode_result("f", object())


def test_reference_within_a_list_does_not_travel() -> None:
    with pytest.raises(RunError, match=r"argument 1 of f\[0\] is a RemoteReference"):
        encode_arguments("f", [references(ReferenceId(1, 5))], {})


def test_too_many_or_too_long_arguments_are_refused() -> None:
    with pytest.raises(RunError, match=f"called with {MAX_ARGUMENTS + 1} arguments"):
        encode_arguments("f", range(MAX_ARGUMENTS + 1), {})
    with pytest.raises(RunError, match="letters for a name"):
        encode_arguments("f", [], {"x" * 201: 1})


@pytest.mark.parametrize(
    "message",
    [
        CallMessage(0, "f", 1),  # fewer places than values
        CallMessage(0, "f", 3),  # more places than values
        CallMessage(0, "f", 1, ("a", "a")),  # a name twice: one value would be lost
        CallMessage(0, "f", 2, (), ((5, ReferenceId(1, 1)),)),  # a reference without a place
        CallMessage(0, "f", 4, (), ((0, ReferenceId(1, 1)), (0, ReferenceId(1, 2)))),
    ],
)
def test_message_that_does_not_fit_its_values_is_refused(message: CallMessage) -> None:
    body = b"".join(map(bytes, encode_arguments("f", [1, 2], {}).contents))
    with pytest.raises(ProtocolError, match="do not fit"):
        decode_arguments(message, body, references(*(identity for _, identity in message.references)))


@pytest.mark.parametrize("body", [b"", b"x", b"barnraise data 1\n" + b"\xff" * 8])
def test_malformed_values_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_arguments(CallMessage(0, "f", 1), body, [])


def test_result_is_one_value_or_none() -> None:
    assert decode_result(b"") is None
    assert decode_result(b"".join(map(bytes, encode_result("f", {"a": 1})))) == {"a": 1}
    with pytest.raises(ProtocolError, match="result of a remote call cannot be read"):
        decode_result(b"".join(map(bytes, encode_arguments("f", [1, 2], {}).contents)))
