"""Choice of the backend of a group, without torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.runs.backend_choice import (
    BackendChoice,
    RankDevices,
    choose_backend,
    choose_group_backend,
    decode_rank,
    default_backend,
    describe_choice,
    encode_rank,
)

HERE, APART = (0, 0), (0, 1)


@pytest.mark.parametrize(
    ("requested", "machines", "device", "nccl", "backend", "words"),
    [
        ("gloo", HERE, "cpu", False, "gloo", "within one machine"),
        ("GLOO", HERE, "cpu", False, "gloo", "within one machine"),
        (None, HERE, "cpu", False, "gloo", "within one machine"),
        ("nccl", HERE, "cuda:0,cuda:1", True, "nccl", "within one machine"),
        (None, HERE, "cuda:0,cuda:1", True, "nccl", "within one machine"),
        ("cpu:gloo,cuda:nccl", HERE, "cuda:0", True, "cpu:gloo,cuda:nccl", "within one machine"),
        ("mpi", HERE, "cpu", False, "mpi", "within one machine"),
        ("nccl", HERE, "cpu", False, "barnraise", "NCCL needs CUDA on every rank, and these compute on cpu"),
        ("nccl", HERE, "cpu,cuda:0", True, "barnraise", "these compute on cpu, cuda"),
        ("nccl", HERE, "cuda:0", False, "barnraise", "has no NCCL"),
        ("gloo", HERE, "mps", False, "barnraise", "MPS"),
        (None, HERE, "mps", False, "barnraise", "MPS"),
        ("gloo", APART, "cpu", False, "barnraise", "plaintext"),
        ("nccl", APART, "cuda:0", True, "barnraise", "plaintext"),
        (None, APART, "cpu,mps", False, "barnraise", "plaintext"),
        ("cpu:gloo,cuda:nccl", APART, "cuda:0", True, "barnraise", "plaintext"),
        ("mpi", APART, "cpu", False, "barnraise", "mpi is not known to encrypt"),
        ("barnraise", APART, "cpu", False, "barnraise", "asks for it"),
        ("fake", APART, "cpu", False, "fake", "sends nothing"),
    ],
)
def test_backend_follows_request_machines_and_devices(
    requested: str | None, machines: tuple[int, ...], device: str, nccl: bool, backend: str, words: str
) -> None:
    choice = choose_backend(requested, machines, device, nccl_available=nccl)
    assert choice.backend == backend
    assert words in choice.reason


def test_user_may_force_a_backend_or_trust_the_network() -> None:
    assert choose_backend("nccl", APART, "cpu", "gloo") == BackendChoice(
        "gloo", "it was forced with --engine"
    )
    assert choose_backend("gloo", HERE, "cpu", "barnraise").backend == "barnraise"
    assert choose_backend("gloo", APART, "cpu", fabric="trusted").backend == "gloo"
    assert choose_backend("nccl", APART, "cuda:0", fabric="trusted", nccl_available=True).backend == "nccl"
    assert choose_backend("nccl", APART, "cpu,cuda:0", fabric="trusted").backend == "barnraise"
    mixed = choose_backend("gloo", APART, "cpu", fabric="trusted", systems=("darwin", "linux"))
    assert mixed == BackendChoice(
        "barnraise", "Gloo works between machines on Linux only, and these run darwin, linux"
    )
    assert choose_backend("gloo", HERE, "cpu", systems=("darwin",)).backend == "gloo"


def test_ranks_with_different_requests_get_our_backend() -> None:
    ranks = [RankDevices("nccl", "cuda:0", True, "linux"), RankDevices("gloo", "cuda:0", True, "linux")]
    assert choose_group_backend(ranks, APART, "auto", "trusted") == BackendChoice(
        "barnraise", "its ranks ask for different backends (gloo, nccl)"
    )
    assert choose_group_backend(ranks, APART, "gloo", "trusted").backend == "gloo"
    alike = [RankDevices("NCCL", "cuda:0", True, "linux"), RankDevices("nccl", "cuda:1", True, "linux")]
    assert choose_group_backend(alike, HERE, "auto", "untrusted").backend == "nccl"


def test_default_backend_is_that_of_torch() -> None:
    assert (
        default_backend(None, "cpu")
        == default_backend(None, "cpu,cuda:0")
        == default_backend(None, "mps")
        == "gloo"
    )
    assert default_backend(None, "cuda:0,cuda:1") == "nccl"
    assert default_backend("NCCL", "cpu") == "nccl"


@pytest.mark.parametrize(
    ("requested", "choice", "machines", "sentence"),
    [
        ("gloo", BackendChoice("gloo", "why"), HERE, None),
        (None, BackendChoice("gloo", "why"), HERE, None),
        ("barnraise", BackendChoice("barnraise", "why"), APART, None),
        ("fake", BackendChoice("fake", "why"), APART, None),
        (
            "gloo",
            BackendChoice("barnraise", "why"),
            (0, 1, 2, 3),
            "the group of 4 ranks on 4 machines uses barnraise instead of gloo: why",
        ),
        (
            None,
            BackendChoice("barnraise", "why"),
            (0,),
            "the group of 1 rank on 1 machine uses barnraise instead of the default of torch: why",
        ),
        (
            "gloo",
            BackendChoice("gloo", "why"),
            APART,
            "the group of 2 ranks on 2 machines uses gloo: why; it sends plaintext",
        ),
        (
            "barnraise",
            BackendChoice("nccl", "why"),
            APART,
            "the group of 2 ranks on 2 machines uses nccl instead of barnraise: why; it sends plaintext",
        ),
    ],
)
def test_describe_choice_names_backend_and_reason(
    requested: str | None, choice: BackendChoice, machines: tuple[int, ...], sentence: str | None
) -> None:
    assert describe_choice(requested, choice, machines) == sentence


names = st.sampled_from(
    [None, "gloo", "nccl", "NCCL", "cpu:gloo,cuda:nccl", "ucc", "mpi", "barnraise", "", ":,:"]
)
rank_devices = st.builds(
    RankDevices,
    names | st.text(max_size=20),
    st.sampled_from(["cpu", "mps", "cuda:0", "cuda:1", ""]) | st.text(max_size=20),
    st.booleans(),
    st.sampled_from(["linux", "darwin", "win32"]),
)


@given(st.lists(rank_devices, min_size=2, max_size=5), st.data())
def test_no_request_of_a_peer_causes_plaintext_between_machines(
    ranks: list[RankDevices], data: st.DataObject
) -> None:
    machines = (
        0,
        1,
        *data.draw(st.lists(st.integers(0, 3), min_size=len(ranks) - 2, max_size=len(ranks) - 2)),
    )
    assert choose_group_backend(ranks, machines, "auto", "untrusted").backend in ("barnraise", "fake")


@given(rank_devices)
def test_rank_facts_round_trip_through_encoding(rank: RankDevices) -> None:
    assert decode_rank(encode_rank(rank), 0) == rank


@given(st.binary(max_size=200))
def test_random_bytes_raise_protocol_error_only(data: bytes) -> None:
    try:
        decode_rank(data, 7)
    except ProtocolError:
        pass


def test_too_long_names_are_rejected() -> None:
    with pytest.raises(ProtocolError, match="rank 3"):
        decode_rank(encode_rank(RankDevices("x" * 201, "cpu", False, "linux")), 3)
