"""Program and options of a run: the same limits in the request to the agent and in the signed spec."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from barnraise.agent_client.cluster_requests import decode_request, encode
from barnraise.agent_client.run_options import DataSet, ModelVersion, RunOptions, RunProgram, ScriptImports
from barnraise.agent_client.run_requests import StartRunRequest
from barnraise.core.errors import ProtocolError
from barnraise.identity import NodeKey
from barnraise.runs.record import RunSpec, read_spec, sign_spec

KEY = NodeKey.generate()
PROGRAM = RunProgram(
    command=("train.py", "--epochs", "3"),
    folder=bytes(32),
    data=(
        DataSet("mnist", manifest=b"\1" * 32),
        DataSet("own", path="/data"),
        DataSet("base", path="/m", is_model=True, version=ModelVersion("a/b", "refs/pr/1", "0" * 40)),
    ),
    needs=ScriptImports(required=("torch",)),
)
OPTIONS = RunOptions(title="train", per_node=2)
BAD_OPTIONS: list[dict[str, object]] = [
    {"title": "x" * 201},
    {"per_node": -1},
    {"per_node": 65},
    {"min_nodes": 0},
    {"min_nodes": 257},
    {"wait_s": -1.0},
    {"wait_s": float("nan")},
    {"wait_s": 86401.0},
    {"restarts": 1001},
    {"environment": "conda"},
    {"engine": "mpi"},
    {"fabric": ""},
    {"quiet": 1},
    {"nice": 20},
    {"memory_bytes": (1 << 50) + 1},
    {"container": "x" * 201},
    {"sandbox": 1},
]
BAD_PROGRAMS: list[dict[str, object]] = [
    {"command": ()},
    {"command": ("x",) * 1025},
    {"command": ("x" * 32769,)},
    {"folder": bytes(33)},
    {"data": (DataSet("../up"),)},
    {"data": (DataSet("name\n"),)},
    {"data": (DataSet("x" * 41),)},
    {"data": (DataSet("x", manifest=bytes(33)),)},
    {"data": (DataSet("x"),) * 65},
    {"data": (DataSet("x", manifest=bytes(32), files=-1),)},
    {"data": (DataSet("x", manifest=bytes(32), bytes=(1 << 50) + 1),)},
    *(
        {"data": (DataSet("x", version=ModelVersion(*names)),)}
        for names in (
            ("../up", "main", "0" * 40),
            ("a/b/c", "main", "0" * 40),
            ("a--b", "main", "0" * 40),
            ("a/b.", "main", "0" * 40),
            ("a/b", "../main", "0" * 40),
            ("a/b", "x/../y", "0" * 40),
            ("a/b", "/etc", "0" * 40),
            ("a/b", "a\\b", "0" * 40),
            ("a/b", "main", "../" + "0" * 37),
            ("a/b", "main", "0" * 40 + "\n"),
        )
    ),
    {"packages": -1},
    {"settings": (("x" * 201, ""),)},
    {"settings": (("X", "x" * 32769),)},
    {"settings": (("X", ""),) * 257},
    {"needs": ScriptImports(required=("x",) * 513)},
    {"needs": ScriptImports(optional=("x" * 129,))},
    {"needs": ScriptImports(cuda="x" * 601)},
]


def read_twice(program: RunProgram, options: RunOptions) -> tuple[StartRunRequest, RunSpec]:
    """Return the request as the agent decodes it, and the spec as another machine decodes it."""
    request = decode_request(encode(StartRunRequest(program=program, options=options)))
    assert isinstance(request, StartRunRequest)
    return request, read_spec(sign_spec(spec(program, options), KEY))


def spec(program: RunProgram, options: RunOptions) -> RunSpec:
    own = KEY.id.raw
    return RunSpec(run="train-abcd", by=own, at=0.0, program=program, options=options, nodes=(own,))


def test_request_and_spec_carry_the_same_program_and_options() -> None:
    request, signed = read_twice(PROGRAM, OPTIONS)
    assert (request.program, request.options) == (PROGRAM, OPTIONS)
    assert (signed.program, signed.options) == (PROGRAM, OPTIONS)


def test_manifests_are_those_of_shipped_files() -> None:
    assert PROGRAM.manifests == (bytes(32), b"\1" * 32)


@pytest.mark.parametrize("bad", BAD_OPTIONS, ids=lambda bad: next(iter(bad)))
def test_option_outside_its_limits_is_rejected(bad: dict[str, object]) -> None:
    _check_rejected(PROGRAM, replace(OPTIONS, **bad))


@pytest.mark.parametrize("bad", BAD_PROGRAMS, ids=lambda bad: next(iter(bad)))
def test_program_outside_its_limits_is_rejected(bad: dict[str, object]) -> None:
    _check_rejected(replace(PROGRAM, **bad), OPTIONS)


def test_every_option_has_a_bad_value_in_this_test() -> None:
    assert {name for bad in BAD_OPTIONS for name in bad} == set(RunOptions.__struct_fields__)
    assert {name for bad in BAD_PROGRAMS for name in bad} == set(RunProgram.__struct_fields__)


def test_spec_without_program_is_rejected() -> None:
    record = sign_spec(spec(PROGRAM, OPTIONS), KEY)
    fields = msgspec.msgpack.decode(record.order)
    del fields["program"]
    with pytest.raises(ProtocolError, match="program"):
        read_spec(replace(record, order=msgspec.msgpack.encode(fields)))


def _check_rejected(program: RunProgram, options: RunOptions) -> None:
    with pytest.raises(ProtocolError):
        decode_request(encode(StartRunRequest(program=program, options=options)))
    with pytest.raises(ProtocolError):
        read_spec(sign_spec(spec(program, options), KEY))
