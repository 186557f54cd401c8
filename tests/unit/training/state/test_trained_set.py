"""Choice of the tensors that are state, and checks of a received state."""

from __future__ import annotations

from typing import Any

import pytest

from barnraise.core.errors import RunError
from barnraise.training.state.trained_set import (
    BaseDescription,
    Origin,
    OwnTensors,
    TensorFacts,
    check_sets,
    initial_state,
    merge,
    set_digest,
)

HASHES = {"base": "a" * 64, "mask": "b" * 64}


def _facts(name: str, **given: Any) -> TensorFacts:
    facts = {"is_parameter": True, "is_trained": False, "is_statistic": False, "memory": (0, 0), **given}
    return TensorFacts(name, **facts)


def test_model_without_frozen_parameter_is_state_as_a_whole() -> None:
    tensors = [_facts("weight", is_trained=True), _facts("mask", is_parameter=False)]
    assert initial_state(tensors) == {"weight": Origin.WHOLE, "mask": Origin.WHOLE}


def test_frozen_parameters_and_constant_buffers_are_base() -> None:
    tensors = [
        _facts("adapter", is_trained=True, memory=(100, 200)),
        _facts("adapter_view", memory=(190, 210)),
        _facts("before", memory=(90, 100)),
        _facts("base", memory=(200, 300)),
        _facts("mean", is_parameter=False, is_statistic=True),
        _facts("mask", is_parameter=False, memory=(400, 500)),
        _facts("meta"),
    ]
    assert initial_state(tensors) == {
        "adapter": Origin.TRAINED,
        "adapter_view": Origin.SHARED,
        "mean": Origin.STATISTIC,
    }


def _merge(
    received: set[str],
    hashes: dict[str, str] | None,
    *,
    moved: set[str] = frozenset(),  # type: ignore[assignment]
    theirs: tuple[str, ...] = ("adapter",),
    own_hashes: dict[str, str] = HASHES,
    may_differ: bool = False,
    is_checkpoint: bool = False,
) -> frozenset[str]:
    names = frozenset({"adapter", "base", "mask"})
    own = OwnTensors(
        names, names - {"adapter"} - moved, frozenset(moved), trained=("adapter",), may_differ=may_differ
    )
    described = BaseDescription(hashes, theirs)
    return merge(own, received, described, own_hashes.__getitem__, source="pc", is_checkpoint=is_checkpoint)


def test_state_of_same_training_fits() -> None:
    assert _merge({"adapter"}, HASHES) == {"base", "mask"}
    assert _merge({"adapter", "base"}, {"mask": HASHES["mask"]}) == {"mask"}, "it changed there"
    assert _merge({"adapter", "base", "mask"}, {}) == set()
    assert _merge({"adapter"}, None, may_differ=True) == {"base", "mask"}
    assert _merge({"adapter"}, HASHES, moved={"base"}) == {"base", "mask"}, "it has the first contents again"
    assert _merge({"adapter"}, HASHES | {"mask": ""}) == {"base", "mask"}, "there it has no bytes"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"received": {"adapter"}, "hashes": HASHES | {"base": "c" * 64}}, "base differs from that of pc"),
        (
            {"received": {"adapter"}, "hashes": dict.fromkeys(HASHES, "c" * 64)},
            "base, mask differ from those of pc",
        ),
        (
            {"received": {"adapter"}, "hashes": {}},
            "base, mask are neither in the state nor in the base of pc",
        ),
        ({"received": {"adapter"}, "hashes": None}, "pc did not compare the base model"),
        (
            {"received": {"adapter"}, "hashes": HASHES | {"more": "c" * 64}},
            "more is not in this model, but in the base of pc",
        ),
        (
            {"received": {"adapter", "more"}, "hashes": HASHES},
            "more is not in this model, but in the state of pc",
        ),
        (
            {"received": {"adapter"}, "hashes": HASHES, "theirs": ("adapter", "mask")},
            "mask is frozen here, but trained on pc",
        ),
        ({"received": {"base"}, "hashes": HASHES, "theirs": ()}, "adapter is trained here, but frozen on pc"),
        (
            {"received": {"adapter"}, "hashes": HASHES | {"base": "c" * 64}, "moved": {"base"}},
            "base was changed here, but not on pc",
        ),
        (
            {"received": {"adapter"}, "hashes": None, "moved": {"base"}, "may_differ": True},
            "base was changed here, but not on pc",
        ),
        (
            {
                "received": {"base"},
                "hashes": {**HASHES, "adapter": "c" * 64},
                "theirs": (),
                "is_checkpoint": True,
                "own_hashes": {**HASHES, "adapter": "d" * 64},
            },
            "adapter differs from that of pc",
        ),
    ],
)
def test_state_that_does_not_fit_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError) as caught:
        _merge(**given)
    assert caught.value.message == message


def test_many_names_are_counted() -> None:
    names = [f"layers.{number}" for number in range(9)]
    own = OwnTensors(frozenset(names), frozenset(names), frozenset(), (), may_differ=False)
    described = BaseDescription(dict.fromkeys(names, "a" * 64), ())
    with pytest.raises(RunError, match=r"layers.1, layers.2 and 6 more tensors differ from those of pc"):
        merge(own, (), described, lambda name: "b" * 64, source="pc")


def test_votes_with_other_sets_name_tensor_and_machine() -> None:
    names = ["mac", "pc"].__getitem__
    check_sets([b"a", b"a"], [(), ()], names)
    with pytest.raises(RunError, match="teacher changed on pc after prepare, but not on mac"):
        check_sets([b"a", b"b"], [(), ("teacher",)], names)
    with pytest.raises(RunError, match="mac and pc have different tensors in their training state"):
        check_sets([b"a", b"b"], [("teacher",), ("teacher",)], names)
    assert set_digest(["b", "a"]) == set_digest(["a", "b"]) != set_digest(["a"])
