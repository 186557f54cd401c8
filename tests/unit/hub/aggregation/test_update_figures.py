"""Figures of updates: norms are right, and no sender can compute a sketch in advance."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.hub.aggregation.update_checks import SKETCH, judge_round
from barnraise.hub.aggregation.update_figures import draw_key, measure, sketch_round
from barnraise.hub.protocol.vector_file import VectorFile, VectorForm, encode_vector
from barnraise.hub.rounds.leases import PendingUpdate
from barnraise.hub.storage.create import create_invite
from barnraise.hub.storage.log import AcceptedUpdate
from tests.unit.hub.hub_process import LAYOUT, TERMS, declared, encoded
from tests.unit.hub.in_process_hub import ADDRESS, InProcessHub, play

FRIENDS = 6


def _files(folder: Path, vectors: Sequence[torch.Tensor], form: VectorForm) -> list[VectorFile]:
    files = []
    for number, vector in enumerate(vectors):
        sink = io.BytesIO()
        encode_vector(sink, vector, form)
        path = folder / f"update-{number}"
        path.write_bytes(sink.getvalue())
        files.append(VectorFile(path, form))
    return files


def _cosine(a: numpy.ndarray, b: numpy.ndarray) -> float:
    return float(a @ b / numpy.linalg.norm(a) / numpy.linalg.norm(b))


def test_measure_returns_norm_and_sketch(tmp_path: Path) -> None:
    torch.manual_seed(3)
    form, key = VectorForm(20_000, 4096, "fp32", 0), draw_key()
    first, second = torch.randn(20_000), torch.randn(20_000)
    files = _files(tmp_path, [first, second, first + 0.01 * second], form)
    figures = [measure(tmp_path / f"update-{number}", form, key) for number in range(len(files))]
    assert figures[0].norm == pytest.approx(float(first.norm()), rel=1e-5)
    sketches = [numpy.frombuffer(figure.sketch, dtype="<f4") for figure in figures]
    assert _cosine(sketches[0], sketches[2]) > 0.999
    assert abs(_cosine(sketches[0], sketches[1])) < 0.15
    other = numpy.frombuffer(measure(tmp_path / "update-0", form, draw_key()).sketch, dtype="<f4")
    assert abs(_cosine(sketches[0], other)) < 0.15, "another key shows nothing of the same update"
    with pytest.raises(ProtocolError):
        measure(tmp_path / "update-0", VectorForm(20_001, 4096, "fp32", 0), key)


def test_round_sketches_show_angles_and_differ_each_time(tmp_path: Path) -> None:
    torch.manual_seed(4)
    form = VectorForm(20_000, 4096, "int8", 0)
    first, second = torch.randn(20_000), torch.randn(20_000)
    files = _files(tmp_path, [first, second, -first], form)
    with ThreadPoolExecutor(2) as pool:
        first_time, second_time = sketch_round(files, pool), sketch_round(files, pool)
        small = VectorForm(4 * SKETCH - 1, 4096, "fp32", 0)
        assert sketch_round(_files(tmp_path, [torch.randn(small.numel)], small), pool) == []
    assert _cosine(first_time[0], first_time[2]) < -0.999
    assert abs(_cosine(first_time[0], first_time[1])) < 0.15
    assert abs(_cosine(first_time[0], second_time[0])) < 0.15


def _public_signs(chunk: int, count: int) -> numpy.ndarray:
    """Signs that every hub used to share: what an attacker would try first."""
    drawn = numpy.random.Generator(numpy.random.Philox(key=chunk)).bytes(-(-count // 8))
    bits = numpy.unpackbits(numpy.frombuffer(drawn, dtype=numpy.uint8), count=count)
    return 1.0 - 2.0 * bits


def _public_sketch(vector: numpy.ndarray) -> numpy.ndarray:
    total = numpy.zeros(SKETCH)
    for chunk, first in enumerate(range(0, len(vector), TERMS.chunk)):
        part = vector[first : first + TERMS.chunk]
        padded = numpy.zeros(-(-len(part) // SKETCH) * SKETCH)
        padded[: len(part)] = part * _public_signs(chunk, len(part))
        total += padded.reshape(-1, SKETCH).sum(axis=0)
    return total


def _solved(wanted: numpy.ndarray, bad: numpy.ndarray) -> numpy.ndarray:
    """Return an update close to ``bad`` whose sketch under the public signs is that of ``wanted``.

    Each sketch position gets the missing amount in equal parts from all numbers that it sums up.
    """
    missing = _public_sketch(wanted) - _public_sketch(bad)
    fix = numpy.zeros(len(bad))
    for chunk, first in enumerate(range(0, len(bad), TERMS.chunk)):
        count = len(bad[first : first + TERMS.chunk])
        places = numpy.arange(count) % SKETCH
        fix[first : first + count] = missing[places] * _public_signs(chunk, count)
    at = numpy.concatenate(
        [numpy.arange(len(bad[first : first + TERMS.chunk])) for first in range(0, len(bad), TERMS.chunk)]
    )
    return bad + fix / numpy.bincount(at % SKETCH, minlength=SKETCH)[at % SKETCH]


def test_update_solved_for_public_sketch_is_refused(tmp_path: Path) -> None:
    """A stranger sends the reverse of the training, corrected so that its known projection agrees."""
    random = numpy.random.default_rng(0)
    direction = random.normal(size=LAYOUT.numel) * 0.01
    honest = [direction + 0.3 * 0.01 * random.normal(size=LAYOUT.numel) for _ in range(FRIENDS)]
    evil = _solved(direction, -direction)
    assert _cosine(_public_sketch(evil), _public_sketch(direction)) > 0.999
    assert _cosine(evil, direction) < -0.3, "it points against the training"

    async def story(scene: InProcessHub) -> None:
        friends = [await scene.member() for _ in range(FRIENDS)]
        eve = await scene.join(create_invite(scene.directory, ADDRESS, role="stranger"))
        leases = {node: await scene.lease(node) for node in (*friends, eve)}
        for node, change in zip((eve, *friends), (evil, *honest), strict=True):
            data = encoded(torch.from_numpy(change).float(), TERMS.codec, leases[node].version)
            await scene.send(node, declared(leases[node], data), data)
        await asyncio.wait_for(scene.until(lambda: scene.hub.version == 1), 60)
        assert scene.hub.versions[-1].members == FRIENDS
        await asyncio.wait_for(scene.until(lambda: bool(scene.hub.refusals)), 60)
        (refusal,) = scene.hub.refusals
        assert (refusal.kind, refusal.node) == ("unlike", eve)

    play(tmp_path, story)


def test_sketches_are_not_written_to_log(tmp_path: Path) -> None:
    """A mirror copies the log: with updates and their sketches it could solve for the key."""

    async def story(scene: InProcessHub) -> None:
        ann = await scene.member()
        lease = await scene.lease(ann)
        data = encoded(torch.randn(LAYOUT.numel), TERMS.codec, lease.version)
        await scene.send(ann, declared(lease, data), data)
        assert len(scene.hub.seen[-1].sketch) == 4 * SKETCH
        mirror = await scene.join(create_invite(scene.directory, ADDRESS, role="mirror"))
        assert [seen.sketch for seen in scene.hub.replica(mirror, None).seen] == [b""]

    play(tmp_path, story)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    members=st.integers(5, 12),
    noise=st.floats(0.1, 1.5),
    numel=st.sampled_from([4 * SKETCH, 5197, 20_000]),
)
def test_honest_strangers_pass_under_any_key(
    tmp_path_factory: pytest.TempPathFactory, seed: int, members: int, noise: float, numel: int
) -> None:
    """Updates share a direction, each with noise of its own, from a tenth to one and a half of its length."""
    folder = tmp_path_factory.mktemp("round")
    random = numpy.random.default_rng(seed)
    direction = random.normal(size=numel)
    vectors = [
        torch.from_numpy(direction + noise * random.normal(size=numel)).float() for _ in range(members)
    ]
    form = VectorForm(numel, 1024, "int8", 0)
    with ThreadPoolExecutor(1) as pool:
        sketches = sketch_round(_files(folder, vectors, form), pool)
    names = [f"n{number}" for number in range(members)]
    arrivals = [
        AcceptedUpdate(
            update=PendingUpdate(name, name, "lease", 0, 10),
            sha256=name,
            size=1,
            spans=(),
            norm=1.0,
            scale=1.0,
        )
        for name in names
    ]
    sketched = dict(zip(names, sketches, strict=True))
    assert judge_round(arrivals, frozenset(names), TERMS, sketches=sketched) == {}
