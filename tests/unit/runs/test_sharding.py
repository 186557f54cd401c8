"""Samples, units and leases: exact whoever is there."""

from __future__ import annotations

import numpy
from hypothesis import given
from hypothesis import strategies as st

from barnraise.runs.sharding import DataOrder, lease, seed_of

courses = st.builds(
    DataOrder,
    samples=st.integers(1, 400),
    batch=st.integers(1, 64),
    unit=st.integers(1, 20),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
).filter(lambda course: course.steps_per_epoch > 0)


@given(courses, st.integers(0, 5))
def test_an_epoch_of_any_course_has_every_sample_once(course: DataOrder, epoch: int) -> None:
    """A course that drops its last batch leaves out what does not fill one, and nothing else."""
    order = course.order(epoch)
    assert sorted(order.tolist()) == list(range(course.samples))
    covered: list[int] = []
    for within in range(course.steps_per_epoch):
        step = epoch * course.steps_per_epoch + within
        assert course.place(step) == (epoch, within)
        for unit in course.units(step):
            assert 0 < unit.size <= course.unit
            assert unit.last <= course.samples, "a slice would hide samples that do not exist"
            covered += range(unit.first, unit.last)
        assert not course.drop_last or covered[-1] + 1 == (within + 1) * course.batch
    whole = course.samples - course.samples % course.batch if course.drop_last else course.samples
    assert covered == list(range(whole))


@given(courses, st.integers(0, 20), st.integers(1, 9))
def test_a_round_of_several_steps_covers_what_its_steps_cover(
    course: DataOrder, step: int, period: int
) -> None:
    steps = course.steps(step, period)
    single = [course.span(step + number) for number in range(steps)]
    assert course.span(step, period) == (single[0][0], single[-1][1])
    assert single[-1][1] <= course.samples
    assert steps == period or course.place(step + steps)[1] == 0, "only an epoch's end makes it shorter"


def test_the_order_is_fixed_for_ever() -> None:
    """A run that is resumed with a later version must find the same samples."""
    assert DataOrder(10, 4, 2, seed=7).order(0).tolist() == [8, 4, 1, 6, 3, 2, 7, 5, 9, 0]
    assert DataOrder(10, 4, 2, seed=7).order(1).tolist() != DataOrder(10, 4, 2, seed=7).order(0).tolist()
    assert seed_of(7, 1, 2) == seed_of(7, 1, 2)
    assert len({seed_of(7, step, unit) for step in range(50) for unit in range(50)}) == 2500


@given(
    courses,
    st.lists(st.floats(0.1, 8.0), min_size=1, max_size=6),
    st.integers(0, 20),
    st.randoms(use_true_random=False),
)
def test_whoever_dies_every_unit_is_held_once(
    course: DataOrder, shares: list[float], step: int, random
) -> None:  # type: ignore[no-untyped-def]
    units = course.units(step)
    members = list(range(len(shares)))
    held: dict[int, set[int]] = {member: set() for member in members}
    speeds = dict(enumerate(shares))
    for _ in range(30):
        claimed = {place: frozenset(held[member]) for place, member in enumerate(members)}
        dealt = lease(units, claimed, [speeds[member] for member in members])
        assert dealt == lease(units, claimed, [speeds[member] for member in members])
        everything = sorted([*(one for units_of in claimed.values() for one in units_of), *sum(dealt, ())])
        assert everything == [unit.number for unit in units], "each exactly once"
        # Some of it gets done, then somebody may die or join.
        for place, member in enumerate(members):
            held[member] |= set(dealt[place][: random.randint(0, len(dealt[place]))])
        if len(members) > 1 and random.random() < 0.5:
            del held[members.pop(random.randrange(len(members)))]
        if random.random() < 0.3:
            newcomer = max([*members, *speeds]) + 1
            speeds[newcomer] = random.uniform(0.1, 8.0)
            held[newcomer] = set()
            members.append(newcomer)
        if all(
            set(dealt[place]) <= held.get(member, set()) for place, member in enumerate(members[: len(dealt)])
        ):
            break


def test_shares_are_followed() -> None:
    course = DataOrder(10_000, 1024, 8, seed=1)
    dealt = lease(course.units(0), {}, [1.0, 1.0, 0.5, 0.25])
    counts = [len(one) for one in dealt]
    total = sum(counts)
    assert total == 128
    numpy.testing.assert_allclose(
        [count / total for count in counts], [4 / 11, 4 / 11, 2 / 11, 1 / 11], atol=0.01
    )


def test_who_holds_more_than_its_share_gets_no_more() -> None:
    units = DataOrder(100, 100, 10, seed=1).units(0)
    dealt = lease(units, {0: frozenset(range(8))}, [1.0, 1.0])
    assert dealt == ((), (8, 9))
