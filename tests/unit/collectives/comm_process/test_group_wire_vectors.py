"""Payloads inside frames, compared with vectors that other code produced."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import msgspec
import pytest

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.comm_process import group_setup
from barnraise.collectives.comm_process.group import JoinBody, group_tag, membership_digest
from barnraise.collectives.comm_process.links import handshakes
from barnraise.collectives.comm_process.links.handshakes import HandshakeSecurity
from barnraise.collectives.messages import (
    Failure,
    OperationSpec,
    decode_specification,
    encode_specification,
)
from barnraise.collectives.ops.dtypes import by_code, by_name
from tests.repository import ROOT

VECTORS = json.loads((ROOT / "tests" / "vectors" / "frames.json").read_text("utf-8"))
STRUCTS: dict[str, type[msgspec.Struct]] = {
    "JoinBody": JoinBody,
    "Failure": Failure,
    "CostTable": CostTable,
    "Specification": OperationSpec,
}


def bodies(*types: str) -> list[Any]:
    vectors = [vector for vector in VECTORS["bodies"] if vector["type"] in types]
    return [pytest.param(vector, id=f"{vector['type']}: {vector['name']}") for vector in vectors]


@pytest.mark.parametrize("vector", bodies(*STRUCTS))
def test_structures_match_wire_vectors(vector: dict[str, Any]) -> None:
    fields, wire = dict(vector["fields"]), bytes.fromhex(vector["bytes"])
    if "membership" in fields:
        fields["membership"] = bytes.fromhex(fields["membership"])
    for name in ("late", "sizes"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "sites" in fields:
        fields["sites"] = tuple(tuple(site) for site in fields["sites"])
    kind = STRUCTS[vector["type"]]
    made = kind(**fields)
    assert msgspec.msgpack.encode(made).hex() == wire.hex()
    assert msgspec.msgpack.decode(wire, type=kind) == made
    if isinstance(made, OperationSpec):
        assert encode_specification(made) == wire
        assert decode_specification(wire) == made


@pytest.mark.parametrize("vector", bodies("probe"))
def test_probe_results_match_wire_vectors(vector: dict[str, Any]) -> None:
    wire, fields = bytes.fromhex(vector["bytes"]), vector["fields"]
    assert group_setup._RESULT.pack(fields["size"], fields["seconds"]) == wire
    assert group_setup._RESULT.unpack(wire) == (fields["size"], fields["seconds"])


@pytest.mark.parametrize("vector", bodies("offer"))
def test_offers_match_wire_vectors(vector: dict[str, Any]) -> None:
    from barnraise.collectives.comm_process.point_to_point import PointToPoint
    from barnraise.collectives.messages import SendTo
    from barnraise.transport.links.frames import FrameHeader, FrameKind

    size, sent = vector["fields"]["size"], []
    point_to_point = PointToPoint(
        1, lambda *what: sent.append(what), lambda *what: None, lambda *what: None, lambda text: None
    )
    point_to_point.send(SendTo(1, 1, 3, 9, 1, 0, 0, size, 1.0), memoryview(b""), 0.0)
    assert sent == [
        (3, FrameHeader(FrameKind.OFFER, group=1, first=9, second=1), bytes.fromhex(vector["bytes"]))
    ]
    sent.clear()
    point_to_point.frame(
        2, FrameHeader(FrameKind.OFFER, 8, 1, 0, 9, 1), memoryview(bytes.fromhex(vector["bytes"]))
    )
    assert point_to_point.offers[0].size == size


@pytest.mark.parametrize("vector", VECTORS["hello"], ids=lambda vector: vector["name"])
def test_hello_matches_wire_vectors(vector: dict[str, Any]) -> None:
    wire, worker = bytes.fromhex(vector["bytes"]), bytes.fromhex(vector["worker"])
    own_socket, peer_socket = socket.socketpair()
    with own_socket, peer_socket:
        own_socket.setblocking(False)
        peer_worker = os.urandom(16)
        peer_hello = _finish(
            handshakes._hello(own_socket, _security(worker), vector["stream"]),
            peer_socket,
            wire[:32] + peer_worker,
        )
        assert peer_socket.recv(1000) == wire
        assert peer_hello == (peer_worker, vector["stream"])


def _security(worker: bytes) -> HandshakeSecurity:
    return HandshakeSecurity(worker, "run", bytes(32), True, None, None)


def _finish(steps: Any, far: socket.socket, data: bytes) -> Any:
    far.sendall(data)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            return finished.value


@pytest.mark.parametrize("vector", VECTORS["group_tags"], ids=lambda vector: vector["run"])
def test_group_tags_match_wire_vectors(vector: dict[str, Any]) -> None:
    assert group_tag(vector["run"], vector["generation"], vector["name"]) == int(vector["tag"])


def test_membership_digests_match_wire_vectors() -> None:
    vector = next(vector for vector in VECTORS["bodies"] if vector["name"] == "two members")
    digest = membership_digest((bytes(range(16)), bytes(range(16, 32))))
    assert digest.hex() == vector["fields"]["membership"]


def test_element_type_codes_match_wire_vectors() -> None:
    for name, code in VECTORS["dtypes"].items():
        assert by_name(name).code == code
        assert by_code(code).name == name
