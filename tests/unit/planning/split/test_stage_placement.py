"""Sizes of the parts of a model, and the memory of its stages."""

from __future__ import annotations

from barnraise.planning.split.stage_placement import (
    ModelParts,
    PartSize,
    StagePlacement,
    mirror_bytes,
    stage_bytes,
    whole_bytes,
)

PARTS = ModelParts(PartSize(100, 1), (PartSize(1000, 10, 7),) * 4, PartSize(300), 50)


def test_stage_has_the_parts_at_its_ends_and_room_for_a_mirror() -> None:
    assert stage_bytes(PARTS, 0, 2, stages=2, place=0, batches=8) == 2100 + 2 * 84 + 3 * 14 + 2 * 8 * 50
    assert stage_bytes(PARTS, 2, 4, stages=2, place=1, batches=8) == 2300 + 2 * 80 + 14 + 2 * 8 * 50
    assert stage_bytes(PARTS, 1, 2, stages=3, place=0, batches=2) == 1000 + 2 * 40 + 2 * 7 + 2 * 2 * 50


def test_whole_model_on_one_machine_has_no_buffers_and_no_mirror() -> None:
    assert whole_bytes(PARTS, 8) == 4400 + 4 * 41 + 4 * 7
    assert mirror_bytes(PARTS, 0, 1) == 4 * 11


def test_all_micro_batches_of_gpipe_keep_their_activations() -> None:
    in_turns, all_first = (
        stage_bytes(PARTS, 0, 2, stages=2, place=0, batches=8, order=order) for order in ("1F1B", "GPipe")
    )
    assert all_first - in_turns == (8 - 3) * 14


def test_tied_embeddings_count_once_on_one_machine() -> None:
    tied = PARTS._replace(tied_bytes=100)
    assert whole_bytes(tied, 8) == whole_bytes(PARTS, 8) - 100
    sizes = [stage_bytes(each, 0, 2, stages=2, place=0, batches=8) for each in (PARTS, tied)]
    assert sizes[0] == sizes[1]


def test_machine_without_a_stage_has_no_run() -> None:
    placement = StagePlacement((2, 0), ((0, 3), (3, 4)))
    assert [placement.run_of(machine) for machine in range(3)] == [(3, 4), None, (0, 3)]
