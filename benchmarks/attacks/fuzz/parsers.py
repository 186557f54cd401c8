"""Every parser of bytes that another machine, or another program of this one, can send.

A decoder that a module keeps (``_decoder = msgspec.msgpack.Decoder(...)``) is found in the source and needs
no row. Other places have a row in ``_written``, or a reason in ``OWN_DATA``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from barnraise.artifacts.store import manifest as folder_manifest
from barnraise.checkpoint import serialization
from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.c10d.reconfigure import ReconfigureHandle, decode_handle, encode_handle
from barnraise.collectives.comm_process.decode import decode_peer
from barnraise.collectives.comm_process.group import JoinBody
from barnraise.collectives.messages import Failure, GroupMember, OperationSpec, encode_specification
from barnraise.collectives.rendezvous import _Entry
from barnraise.collectives.rendezvous import _read as read_rendezvous
from barnraise.compression.codecs.codec import CodecRound
from barnraise.compression.codecs.powersgd import PowerSGD
from barnraise.compression.codecs.registry import codec_named
from barnraise.core.decoding import decode
from barnraise.discovery.datagrams import Datagram, decode_datagram, encode_datagram
from barnraise.history import entries as history
from barnraise.history.log_format import decode_frames, encode_frames
from barnraise.history.view_builder import build_view
from barnraise.hub.client import credentials
from barnraise.hub.mirror import handover
from barnraise.hub.protocol import admission, invites, messages, signatures, tls
from barnraise.hub.protocol.vector_file import VectorFile, VectorForm, encode_vector
from barnraise.identity import NodeKey, delegate, read_worker
from barnraise.identity.trust import decode_entry
from barnraise.kvstore import journals
from barnraise.kvstore.store import KeyValueStore
from barnraise.membership.consensus.paxos import PaxosDecision
from barnraise.membership.view import read_view
from barnraise.pairing import channel
from barnraise.pairing import messages as pairing
from barnraise.rpc import arguments as rpc_arguments
from barnraise.rpc import connect as rpc_connect
from barnraise.rpc import messages as rpc
from barnraise.rpc.endpoint import RpcEndpoint
from barnraise.rpc.references import RemoteReference
from barnraise.rpc.registry import FunctionRegistry
from barnraise.runs.record import RunSpec, decode_record, read_spec, sign_spec
from barnraise.topology import devices, graph
from barnraise.training.mapping import encoded_values, result_store, result_stream
from barnraise.transport.control.framing import ControlFrames
from barnraise.transport.ipc.fd_passing import IpcFrameReader, encode_frame
from barnraise.transport.links.frames import HEADER_BYTES, FrameHeader, FrameKind, parse_header
from barnraise.transport.listener import preface
from barnraise.worker.launch.serializer import decode_values, encode_values
from benchmarks.attacks.fuzz.corpus import vectors
from benchmarks.attacks.fuzz.examples import examples
from benchmarks.attacks.fuzz.sites import decoding_sites

_SECRET = bytes(range(32))
_ENTRIES = msgspec.msgpack.Decoder(
    Annotated[tuple[history.Entry, ...], msgspec.Meta(max_length=history.MOST_ENTRIES)]
)
_HUB = NodeKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
_PROOF = pairing.PairingProof(
    node=bytes(32), name="pc", platform="Linux", addresses=("192.0.2.1",), port=9, signature=bytes(64)
)
_EXAMPLES = 8
_RPC_ROW = 4096
_LIMITS = folder_manifest.FolderLimits(most_bytes=1 << 30, most_files=1000)
Parse = Callable[[bytes], object]


@dataclass(frozen=True)
class Parser:
    """A parser: ``sites`` are the places in the source that it covers, ``seeds`` makes inputs it accepts.

    ``is_random``: the seeds hold fresh keys or signatures, so one recorded input is enough.
    """

    name: str
    parse: Parse
    sites: tuple[str, ...]
    seeds: Callable[[], list[bytes]] = list
    is_random: bool = False


# Places that read what this machine or this program itself has written, or what the operating system says.
OWN_DATA = {
    "barnraise.agent.cluster.peer_store:PeerStore.__init__": "the agent's own database",
    "barnraise.agent.diagnostics.collect:prefix_of": "an address of this machine",
    "barnraise.agent.journal_storage:_operations": "the agent's own database",
    "barnraise.agent.journal_storage:_states": "the agent's own database",
    "barnraise.agent.notifications.outbox:_notices": "the agent's own database",
    "barnraise.agent.notifications.outbox:_targets": "the agent's own database",
    "barnraise.agent.supervisor.messages:_event_decoder": "a child process of the agent",
    "barnraise.agent.supervisor.messages:_launch_decoder": "the parent process",
    "barnraise.agent.supervisor.messages:_read_body": "the parent or a child process",
    "barnraise.agent.supervisor.messages:_stop_decoder": "the parent process",
    "barnraise.agent.supervisor.pidfile:_decoder": "a private file",
    "barnraise.agent_client.provisional:take_dropped": "a private file",
    "barnraise.artifacts.models.weights:missing_shards": "a file of the machine that starts the run",
    "barnraise.artifacts.store.stamps:_fraction": "a hash that this machine computed",
    "barnraise.checkpoint.files:Checkpoints.read": "a file whose signed hash was compared",
    "barnraise.checkpoint.holders:_notes": "a private file",
    "barnraise.checkpoint.parts.part_files:open_part": "a file whose signed hash was compared",
    "barnraise.checkpoint.parts.part_files:shared_state": "a manifest whose signature was checked",
    "barnraise.checkpoint.shard_exchange:_all_gather_bytes": "its own message, padded",
    "barnraise.cli.agent_call:print_json": "text that the line itself encoded",
    "barnraise.cli.machine.torch_install:probe": "a child process",
    "barnraise.cli.doctor.parsers:nft_lets_in": "a program of the system",
    "barnraise.cli.plan.parse:levels_of": "a file that the person names",
    "barnraise.cli.project_file:read_project_file": "a file of the person's project",
    "barnraise.cli.runs.resume:export": "a child process",
    "barnraise.cli.runs.resume:reshard": "a child process",
    "barnraise.collectives.comm_process.group:group_tag": "a hash that this machine computed",
    "barnraise.collectives.comm_process.links.traffic:retransmits": "what the system says of a socket",
    "barnraise.collectives.messages:Inbox.feed": "the parent or a child process",
    "barnraise.collectives.messages:_command_decoder": "the parent process",
    "barnraise.collectives.messages:_reply_decoder": "a child process",
    "barnraise.collectives.shm.arena:SharedArena._add_segment": "memory of this process",
    "barnraise.compression.codecs.powersgd:PowerSGD._draw": "a hash that this machine computed",
    "barnraise.compression.codecs.randomk:RandomK._draw": "a hash that this machine computed",
    "barnraise.compression.codecs.zlib:ZlibCodec._encode": "numbers of this process",
    "barnraise.core.config:_from_file": "a private file",
    "barnraise.environments.build_size:build_size": "a lock file; a damaged one gives no size",
    "barnraise.environments.installed_packages:query_packages": "a child process",
    "barnraise.environments.package_probe:main": "the parent process",
    "barnraise.hub.aggregation.held_out_process:_evaluate": "a file that the hub wrote",
    "barnraise.hub.aggregation.held_out_validation:HeldOutTrial._read_result": "a child process",
    "barnraise.hub.protocol.tls:_certificate": "the hub's own key",
    "barnraise.hub.protocol.vector_file:encode_vector": "numbers of this process",
    "barnraise.integrations.trackers.wandb:_inspect": "a child process",
    "barnraise.identity.node_id:NodeId.__str__": "a key of 32 bytes",
    "barnraise.rpc.channel:PeerChannel._transmit": "its own packet",
    "barnraise.rpc.connect:encode_row": "its own message, padded",
    "barnraise.membership.storage:_records": "the agent's own database",
    "barnraise.page.access.local_users:_shown": "an address of this machine",
    "barnraise.topology.probe:_load": "a private file",
    "barnraise.topology.probe:run_probe": "a child process",
    "barnraise.training.group.process_group:TrainingGroup._gather_rows": "its own message, padded",
    "barnraise.training.hub.step_loop:HubStepLoop._committed_step": "its own lease",
    "barnraise.training.mapping.exchange:_exchange_pieces": "its own results",
    "barnraise.training.mapping.result_store:_mixed": "its own hashes",
    "barnraise.training.mapping.result_store:ResultStore._read_records": "a private file",
    "barnraise.training.pipeline.passes.schedule:_TravellingStage._unpack": "tensors of a size that we chose",
    "barnraise.training.pipeline.trained_state:TrainedState.pack_gradients": "numbers of this process",
    "barnraise.training.pipeline.weights:StageWeights._initialize": "a hash that this machine computed",
    "barnraise.worker.device_mesh:_gather_ranks": "a tensor of 40 bytes; each value of them is valid",
    "barnraise.training.recovery.state_transfer:send_bytes": "numbers of this process",
    "barnraise.transport.ipc.local_socket:_peer_user": "the operating system",
    "barnraise.transport.listener.listener:main": "the parent process",
    "barnraise.planning.inputs.levels:decode_levels": "the agent of this machine",
    "barnraise.worker.launch.launch:_check_question": "its own request",
    "barnraise.training.record.step_trace:trace_ids": "a hash that this machine computed",
}
# The whole modules whose places read numbers or rows that the hub itself has computed and kept.
OWN_MODULES = {
    "barnraise.hub.aggregation.aggregate": "vectors whose file was checked chunk by chunk",
    "barnraise.hub.aggregation.update_figures": "random numbers that the hub has drawn",
    "barnraise.hub.aggregation.update_checks": "sketches that the hub has computed",
    "barnraise.hub.storage.log": "the hub's own database",
}
# Places that the targets of ``protocols`` reach with whole sessions.
IN_SESSIONS = {
    "barnraise.agent.cluster.pairing_frames:receive_message": "bounded by its caller; see tests/unit/pairing",
    "barnraise.collectives.comm_process.arithmetic:combiner.combine": "engine",
    "barnraise.collectives.comm_process.group_setup:GroupSetup.probe_frame": "engine",
    "barnraise.collectives.comm_process.group_setup:GroupSetup.table_frame": "engine",
    "barnraise.collectives.comm_process.point_to_point:PointToPoint.frame": "engine",
    "barnraise.training.group.process_group:TrainingGroup.all_gather_bytes": "lengths are bounded there",
}


def is_own(site: str) -> bool:
    """Return True if a place reads nothing that another machine wrote, or a whole session covers it."""
    return site in OWN_DATA or site in IN_SESSIONS or site.partition(":")[0] in OWN_MODULES


@functools.cache
def all_parsers() -> dict[str, Parser]:
    """Return the parsers by name: the written rows, and one for each decoder that a module keeps."""
    written = list(_written())
    covered = {site for parser in written for site in parser.sites}
    kept = [
        _of_decoder(site) for site in sorted(decoding_sites()) if site not in covered and not is_own(site)
    ]
    parsers = [*written, *(parser for parser in kept if parser is not None)]
    return {parser.name: parser for parser in parsers}


def _of_decoder(site: str) -> Parser | None:
    decoder = _decoder_at(site)
    if decoder is None:
        return None
    name = site.removeprefix("barnraise.").replace(":", ".")
    return Parser(
        name,
        lambda data: decode(decoder, data, "it cannot be read"),
        (site,),
        lambda: examples(decoder, _EXAMPLES),
    )


def _decoder_at(site: str) -> msgspec.msgpack.Decoder[Any] | msgspec.json.Decoder[Any] | None:
    module, _, name = site.partition(":")
    value = getattr(importlib.import_module(module), name, None)
    return value if isinstance(value, msgspec.msgpack.Decoder | msgspec.json.Decoder) else None


def _made(site: str) -> list[bytes]:
    decoder = _decoder_at(site)
    return [] if decoder is None else examples(decoder, _EXAMPLES)


def _stream(reader: Callable[[], Any]) -> Parse:
    """Return a parser of a stream of frames."""

    def parse(data: bytes) -> object:
        frames, count = reader(), 0
        frames.feed(data)
        while frames.next() is not None:
            count += 1
        return count

    return parse


def _latin(read: Callable[[str], object]) -> Parse:
    return lambda data: read(data.decode("latin-1"))


def _written() -> Iterator[Parser]:
    yield from _wire()
    yield from _cluster()
    yield from _tensors()
    yield from _hub()


def _history_entries() -> list[history.Entry]:
    """Return one entry of each kind that a record holds."""
    node = bytes(32)
    return [
        history.LogHead("train-k3f9", node, "agent", bytes(16), 1.0, cluster=node),
        history.MachineFacts(node, "mac", "cpu", 1e9, "Linux"),
        history.RunStart(1.0, "barnraise run train.py", options=(("copies", "2"),)),
        history.TrainingGoal(1.0, 600, 64, metric="loss"),
        history.GroupStart(2.0, 1, 0, (node, node), "start"),
        history.StepBatch(1, 0, 2.0, (10, 11), (64, 64), ((1, 2),) * 6),
        history.ValueBatch(1, 0, ("loss",), (bytes(8),), 2, (bytes(8),), (bytes(8),)),
        history.StepBatch(3, 4, 2.0, (10,), (64,), stride=9, spans=(2, 6, 1), oldest=1),
        history.ValueBatch(
            3, 4, ("loss",), (bytes(4),), 9, (bytes(4),), (bytes(4),), spans=(1, 7, 1), oldest=2
        ),
        history.OwnValues(1, 2, 0, ("loss",), (1.0,), (2.0,)),
        history.MembershipChange(3.0, node, "died", "it was killed", 2, 2),
        history.PlanAdopted(3.0, 2, "ring", "exact", "it is fast", 0.1, (0.1,) * 6, ((node, 3.0),)),
        history.CheckpointSaved(4.0, 2, node, 100.0),
        history.MachineSample(4.0, node, 1e9, 50.0, 100.0, 5.0, 20.0, 0.5, 0.9),
        history.LinkSample(4.0, ((node, node, 940.0, 0.3),)),
        history.FailureNote(5.0, node, "it was killed", 1, -1, 9, 2, "tail"),
        history.NoteEntry(5.0, "text", node, 2),
        history.RunEnd(6.0, 0, "finished"),
    ]


def _view_of_entries(data: bytes) -> object:
    """Show a run whose entries come from another machine."""
    entries: tuple[history.Entry, ...] = decode(_ENTRIES, data, "these entries cannot be read")
    return build_view(entries)


def _wire() -> Iterator[Parser]:
    transport = "barnraise.transport"
    yield Parser(
        "frame-header",
        lambda data: parse_header(data.ljust(HEADER_BYTES, b"\0")),
        (f"{transport}.links.frames:parse_header",),
        lambda: [*vectors("frames"), *(FrameHeader(kind, 100, 1, 2, 3, 4).encode() for kind in FrameKind)],
    )
    yield Parser(
        "preface",
        lambda data: preface.parse(data, lambda route, target: _SECRET),
        (f"{transport}.listener.preface:parse",),
        lambda: [*vectors("preface"), preface.encode(preface.Preface(bytes(16), bytes(16)), _SECRET)],
    )
    yield Parser(
        "preface-answer",
        preface.parse_answer,
        (f"{transport}.listener.preface:parse_answer",),
        lambda: [preface.encode_answer(1)],
    )
    yield Parser(
        "control-frames",
        _stream(lambda: ControlFrames(1 << 16)),
        (f"{transport}.control.framing:ControlFrames.next",),
        lambda: vectors("control"),
    )
    yield Parser(
        "local-frames",
        _stream(IpcFrameReader),
        (f"{transport}.ipc.fd_passing:IpcFrameReader.next",),
        lambda: [encode_frame(b"message"), encode_frame(b"", share=b"share", has_socket=True)],
    )
    yield Parser(
        "history-frames",
        decode_frames,
        ("barnraise.history.log_format:_body_at",),
        lambda: [encode_frames(_history_entries()), encode_frames(_history_entries()[:2])],
    )
    yield Parser(
        "history-view",
        _view_of_entries,
        ("barnraise.history.columns:unpack_column",),
        lambda: [msgspec.msgpack.encode(_history_entries())],
    )
    comm = "barnraise.collectives"
    bodies: dict[str, tuple[type[msgspec.Struct], bytes]] = {
        "join": (JoinBody, msgspec.msgpack.encode(JoinBody(1, "group", 0, 4, bytes(16)))),
        "failure": (Failure, msgspec.msgpack.encode(Failure("peer-lost", "why", 2, (1, 2)))),
        "costs": (CostTable, msgspec.msgpack.encode(CostTable.default())),
        "operation": (
            OperationSpec,
            encode_specification(OperationSpec("all_reduce", 1, "sum", -1, "ring", (9,), 64, 2)),
        ),
    }
    sites = (f"{comm}.comm_process.decode:decode_peer", f"{comm}.messages:_specification_decoder")
    for name, (kind, seed) in bodies.items():
        yield Parser(
            f"frame-body-{name}",
            functools.partial(_decode_body, kind),
            sites,
            functools.partial(_seeds_of_body, kind, seed),
        )
    entry = msgspec.msgpack.encode(_Entry(GroupMember(bytes(16), 52416, ("192.0.2.1",)), "fresh"))
    yield Parser(
        "rendezvous-entry",
        lambda data: read_rendezvous(data, 0),
        (f"{comm}.rendezvous:_read",),
        lambda: [entry],
    )
    handle = encode_handle(ReconfigureHandle(GroupMember(bytes(16), 52416, ("192.0.2.1",)), bytes(16)))
    yield Parser(
        "reconfigure-handle",
        lambda data: decode_handle(data.decode("latin-1")),
        (f"{comm}.c10d.reconfigure:decode_handle",),
        lambda: [handle.encode()],
    )

    yield Parser(
        "rpc-packet",
        _read_rpc_packet,
        ("barnraise.rpc.messages:read_sizes",),
        _rpc_packets,
    )
    yield Parser(
        "rpc-row",
        lambda data: rpc_connect.decode_row(data.ljust(_RPC_ROW, b"\0")),
        ("barnraise.rpc.connect:decode_row",),
        lambda: [bytes(rpc_connect.encode_row(entry).numpy()).rstrip(b"\0")],
    )


def _read_rpc_packet(data: bytes) -> object:
    """Read a packet as a worker does that gets it from another one."""
    packet = memoryview(data.ljust(rpc.FRAME_BYTES, b"\0"))
    head, body = rpc.read_sizes(packet[: rpc.FRAME_BYTES]).split(packet)
    message = rpc.decode_message(head)
    if not isinstance(message, rpc.CallMessage):
        return message, rpc_arguments.decode_result(body)
    endpoint = RpcEndpoint(0, 1, FunctionRegistry())
    references = [RemoteReference(endpoint, identity) for _, identity in message.references]
    return rpc_arguments.decode_arguments(message, body, references)


def _rpc_packets() -> list[bytes]:
    """Return packets of all kinds of messages, without the zeros at their ends."""
    arguments = rpc_arguments.encode_arguments("f", [1, torch.zeros(2)], {"key": "a"}).contents
    result = rpc_arguments.encode_result("f", {"a": (1.5, None)})
    place = ((1, rpc.ReferenceId(1, 2)),)
    messages: list[tuple[rpc.Message, list[Any]]] = [
        (rpc.CallMessage(1, "f", 2, ("key",), (), False, 9.0), arguments),
        (rpc.CallMessage(2, "f", 3, ("key",), place, True, 9.0), arguments),
        (rpc.ResultMessage(1), result),
        (rpc.ResultMessage(1, rpc.ReferenceId(0, 5)), []),
        (rpc.ErrorMessage(1, "ValueError", "why"), []),
        (rpc.FetchMessage(1, 2), []),
        (rpc.LeaseMessage(1, 2, 0), []),
        (rpc.ReleaseMessage(1, 2), []),
        (rpc.GoodbyeMessage(), []),
    ]
    return [bytes(rpc.encode_packet(message, contents)).rstrip(b"\0") for message, contents in messages]


def _decode_body(kind: type[msgspec.Struct], data: bytes) -> object:
    return decode_peer(data, kind)


def _seeds_of_body(kind: type[msgspec.Struct], seed: bytes) -> list[bytes]:
    return [seed, *examples(msgspec.msgpack.Decoder(kind), _EXAMPLES)]


def _cluster() -> Iterator[Parser]:
    yield Parser(
        "worker-certificate",
        read_worker,
        ("barnraise.identity.delegation:read_worker",),
        lambda: [_certificate()],
        is_random=True,
    )
    yield Parser(
        "trust-entry",
        decode_entry,
        ("barnraise.identity.trust:_DECODER",),
        lambda: [*vectors("trust"), *_made("barnraise.identity.trust:_DECODER")],
    )
    yield Parser(
        "discovery-datagram",
        decode_datagram,
        ("barnraise.discovery.datagrams:decode_datagram",),
        lambda: [encode_datagram(Datagram(kind, "ab" * 16, 9)) for kind in ("question", "answer")],
    )
    for kind in (pairing.PairingHello, pairing.PairingProof, pairing.PairingGrant, pairing.PairingDone):
        yield Parser(
            f"pairing-{kind.__name__.removeprefix('Pairing').lower()}",
            functools.partial(_decode_pairing, kind),
            ("barnraise.pairing.messages:_DECODER",),
            functools.partial(_msgpack_examples, kind),
        )
    yield Parser(
        "pairing-element",
        lambda data: channel._check_element(data, "joiner"),
        ("barnraise.pairing.channel:_check_element",),
        lambda: [b"A" + b"\x05" + bytes(31)],
    )
    yield Parser(
        "view",
        lambda data: read_view(PaxosDecision(0, 1, bytes(32), (), data)),
        ("barnraise.membership.view:_decoder",),
        lambda: _made("barnraise.membership.view:_decoder"),
    )
    yield Parser(
        "journal-entry",
        lambda data: journals.decode_entry(data, "default"),
        ("barnraise.kvstore.journals:decode_entry",),
        lambda: [
            b'{"op_code":4,"worker_id":"w","study_id":0,"datetime_start":null}',
            b'{"op_code":7,"trial_id":3,"step":0,"intermediate_value":NaN,"params":{"x":[1e-3,"a"]}}',
        ],
    )
    yield Parser(
        "store-snapshot",
        KeyValueStore.from_snapshot,
        ("barnraise.kvstore.store:_snapshot_decoder",),
        lambda: _made("barnraise.kvstore.store:_snapshot_decoder"),
    )
    yield Parser(
        "run-record",
        lambda data: read_spec(decode_record(data)),
        ("barnraise.runs.record:_records", "barnraise.runs.record:_orders"),
        _signed_records,
    )
    yield Parser(
        "folder-manifest",
        lambda data: folder_manifest.decode_manifest(data, _LIMITS),
        ("barnraise.artifacts.store.manifest:_decoder",),
        lambda: _made("barnraise.artifacts.store.manifest:_decoder"),
    )
    yield Parser(
        "machine-facts",
        devices.decode_machine,
        ("barnraise.topology.devices:decode_machine",),
        lambda: examples(msgspec.msgpack.Decoder(devices.Machine), _EXAMPLES),
    )
    yield Parser(
        "topology-graph",
        graph.decode_graph,
        ("barnraise.topology.graph:decode_graph",),
        lambda: examples(msgspec.msgpack.Decoder(graph.TopologyGraph), _EXAMPLES),
    )


def _result_streams() -> list[bytes]:
    stream = result_stream.OutgoingStream({3: b"result", 0: b""}.__getitem__)
    stream.add((3, 0))
    return [stream.take()]


def _signed_records() -> list[bytes]:
    specs = (msgspec.msgpack.decode(data, type=RunSpec) for data in _made("barnraise.runs.record:_orders"))
    own = (msgspec.structs.replace(spec, by=_HUB.id.raw) for spec in specs)
    return [msgspec.msgpack.encode(sign_spec(spec, _HUB)) for spec in own]


def _decode_pairing(kind: type[Any], data: bytes) -> object:
    return pairing.decode(data, kind, limit=1 << 20)


def _certificate() -> bytes:
    pem = delegate(NodeKey.generate(), run="run", worker=b"W" * 16).certificate_pem
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


def _tensors() -> Iterator[Parser]:
    yield Parser(
        "tensor",
        serialization.decode_tensor,
        (
            "barnraise.checkpoint.serialization:_encoded_tensors",
            "barnraise.checkpoint.serialization:tensor_from_bytes",
        ),
        lambda: [serialization.encode_tensor(torch.arange(6.0).reshape(2, 3))],
    )
    yield Parser(
        "state-skeleton",
        lambda data: serialization.unflatten(data, [torch.zeros(2)]),
        ("barnraise.checkpoint.serialization:_trees",),
        lambda: [serialization.flatten({"a": [torch.zeros(2), 1, "b"], "c": (2.5, None)}).skeleton],
    )
    mapping = "barnraise.training.mapping"
    yield Parser(
        "map-result",
        encoded_values.decode_value,
        (f"{mapping}.encoded_values:_values",),
        lambda: [encoded_values.encode_value({"a": [torch.zeros(2), 1, "b"], "c": (2.5, None)}, "a result")],
    )
    yield Parser(
        "map-stream",
        lambda data: list(result_stream.IncomingStream().feed(data)),
        (f"{mapping}.result_stream:IncomingStream.feed",),
        _result_streams,
    )
    yield Parser(
        "map-bitmap",
        lambda data: result_store.bits_of_bitmap(data, 20),
        (f"{mapping}.result_store:bits_of_bitmap",),
        lambda: [bytes(3), b"\xff\x01\x80"],
    )
    yield Parser(
        "shipped-values",
        decode_values,
        (
            "barnraise.worker.launch.serializer:decode_values",
            "barnraise.worker.launch.serializer:_Reader._leaf",
        ),
        lambda: [b"".join(map(bytes, encode_values([("x", {"a": [1, 2.5, "b", None, -(1 << 70)]})])))],
    )
    for name in ("bf16+zlib", "int8", "int8:block=128", "topk", "topk-fp32", "int4+zlib"):
        zlib = "barnraise.compression.codecs.zlib"
        yield Parser(
            f"codec-{name.translate(str.maketrans('+:=', '---'))}",
            functools.partial(_decode_payload, name),
            (f"{zlib}:ZlibCodec._add", f"{zlib}:_next_plane") if "zlib" in name else (),
            functools.partial(_payloads, name),
        )


_NUMBERS = 300


def _payloads(name: str) -> list[bytes]:
    codec = codec_named(name)
    assert not isinstance(codec, PowerSGD)
    flat = torch.linspace(-1.0, 1.0, _NUMBERS)
    return [codec.encode(flat, CodecRound("x", 0)).contiguous().numpy().tobytes()]


def _decode_payload(name: str, data: bytes) -> object:
    codec = codec_named(name)
    assert not isinstance(codec, PowerSGD)
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    return codec.decode(payload, _NUMBERS, CodecRound("x", 0))


def _hub() -> Iterator[Parser]:
    protocol = "barnraise.hub.protocol"
    kinds = [
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == messages.__name__
    ]
    for kind in kinds:
        yield Parser(
            f"hub-{kind.__name__}",
            functools.partial(messages.decode_message, kind),
            (f"{protocol}.messages:decode_message",),
            functools.partial(_json_examples, kind),
        )
    yield Parser(
        "hub-invite",
        _latin(invites.read_invite),
        (f"{protocol}.invites:_decoder", f"{protocol}.invites:read_invite"),
        lambda: [_checked_text(data) for data in _made(f"{protocol}.invites:_decoder")],
    )
    yield Parser(
        "hub-admission-proof", _check_admission, (f"{protocol}.admission:check_proof",), _admission_requests
    )
    yield Parser(
        "hub-handover",
        _latin(lambda text: handover.read_handover(text, [_HUB.id])),
        ("barnraise.hub.mirror.handover:_decoder", "barnraise.hub.mirror.handover:read_handover"),
        lambda: [handover.sign_handover(_HUB, _HUB.id, _HUB.id, 1, 2).encode()],
    )
    yield Parser(
        "hub-credentials",
        _latin(credentials.parse_credentials),
        ("barnraise.hub.client.credentials:_decoder", "barnraise.hub.client.credentials:parse_credentials"),
        lambda: [
            base64.urlsafe_b64encode(data) for data in _made("barnraise.hub.client.credentials:_decoder")
        ],
    )
    yield Parser(
        "hub-certificate",
        tls._key_of,
        (f"{protocol}.tls:_key_of",),
        lambda: [_certificate()],
        is_random=True,
    )
    verify = ("verify_request", "verify_response", "_read")
    yield Parser(
        "hub-signature",
        _verify_headers,
        tuple(f"{protocol}.signatures:{name}" for name in verify),
        lambda: [_signed_headers()],
        is_random=True,
    )
    yield Parser(
        "hub-vector",
        _read_vector,
        (f"{protocol}.vector_file:VectorFile.__init__", f"{protocol}.vector_file:VectorForm.decode"),
        lambda: [_vector()],
    )


def _admission_requests() -> list[bytes]:
    statement = admission.AdmissionStatement(
        hub=_HUB.id.raw, member=_HUB.id.raw, invite=_HUB.id.raw, role="friend", run="run", expires=9
    )
    return [msgspec.json.encode(admission.admission_request(_HUB, statement, "pc"))]


def _check_admission(data: bytes) -> object:
    request = messages.decode_message(messages.JoinRequest, data)
    admission.check_proof(request, _HUB.id, _HUB.id, _HUB.id, "run")
    return request


def _msgpack_examples(kind: type[msgspec.Struct]) -> list[bytes]:
    return [msgspec.msgpack.encode(_PROOF), *examples(msgspec.msgpack.Decoder(kind), _EXAMPLES)]


def _json_examples(kind: type[msgspec.Struct]) -> list[bytes]:
    return examples(msgspec.json.Decoder(kind), _EXAMPLES)


def _checked_text(data: bytes) -> bytes:
    check = hashlib.sha256(data).digest()[:3]
    return invites.PREFIX.encode() + base64.urlsafe_b64encode(check + data).rstrip(b"=")


def _signed_headers() -> bytes:
    headers = signatures.sign_response(_HUB, 200, b"body", "", 1.0)
    return "\n".join(f"{name}: {value}" for name, value in headers.items()).encode("latin-1")


def _verify_headers(data: bytes) -> object:
    lines = (line.partition(": ") for line in data.decode("latin-1").split("\n"))
    headers = {name: value for name, _, value in lines}
    return signatures.verify_response(_HUB.id, 200, headers, b"body", {})


def _vector_form() -> VectorForm:
    return VectorForm(_NUMBERS, 128, "int8", 1)


def _vector() -> bytes:
    sink = io.BytesIO()
    encode_vector(sink, torch.linspace(-1.0, 1.0, _NUMBERS), _vector_form())
    return sink.getvalue()


def _read_vector(data: bytes) -> object:
    with tempfile.NamedTemporaryFile(prefix="by-vector-") as file:
        file.write(data)
        file.flush()
        return [chunk.numel() for chunk in VectorFile(Path(file.name), _vector_form()).chunks()]
