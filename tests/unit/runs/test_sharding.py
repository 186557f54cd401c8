"""Order of samples, micro-batches, and their assignment to members."""

from __future__ import annotations

import numpy
from hypothesis import given
from hypothesis import strategies as st

from barnraise.runs.sharding import DataOrder, assign_micro_batches, micro_batch_seed

data_orders = st.builds(
    DataOrder,
    samples=st.integers(1, 400),
    batch=st.integers(1, 64),
    micro_batch_size=st.integers(1, 20),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
).filter(lambda data_order: data_order.steps_per_epoch > 0)


@given(data_orders, st.integers(0, 5))
def test_epoch_covers_every_sample_once(data_order: DataOrder, epoch: int) -> None:
    """With ``drop_last`` only an incomplete last batch is left out."""
    order = data_order.sample_order(epoch)
    assert sorted(order.tolist()) == list(range(data_order.samples))
    covered: list[int] = []
    for within in range(data_order.steps_per_epoch):
        step = epoch * data_order.steps_per_epoch + within
        assert data_order.locate_step(step) == (epoch, within)
        for batch in data_order.micro_batches(step):
            assert 0 < batch.size <= data_order.micro_batch_size
            assert batch.last <= data_order.samples, "a slice would hide samples that do not exist"
            covered += range(batch.first, batch.last)
        assert not data_order.drop_last or covered[-1] + 1 == (within + 1) * data_order.batch
    count_covered = (
        data_order.samples - data_order.samples % data_order.batch
        if data_order.drop_last
        else data_order.samples
    )
    assert covered == list(range(count_covered))


@given(data_orders, st.integers(0, 20), st.integers(1, 9))
def test_round_covers_the_positions_of_its_steps(data_order: DataOrder, step: int, period: int) -> None:
    steps = data_order.steps_in_round(step, period)
    single = [data_order.positions(step + number) for number in range(steps)]
    assert data_order.positions(step, period) == (single[0][0], single[-1][1])
    assert single[-1][1] <= data_order.samples
    assert steps == period or data_order.locate_step(step + steps)[1] == 0, (
        "only an epoch's end makes it shorter"
    )


def test_sample_order_is_fixed_across_versions() -> None:
    """A run that is resumed with a later version must find the same samples."""
    assert DataOrder(10, 4, 2, seed=7).sample_order(0).tolist() == [8, 4, 1, 6, 3, 2, 7, 5, 9, 0]
    assert (
        DataOrder(10, 4, 2, seed=7).sample_order(1).tolist()
        != DataOrder(10, 4, 2, seed=7).sample_order(0).tolist()
    )
    assert micro_batch_seed(7, 1, 2) == micro_batch_seed(7, 1, 2)
    assert len({micro_batch_seed(7, step, batch) for step in range(50) for batch in range(50)}) == 2500


@given(
    data_orders,
    st.lists(st.floats(0.1, 8.0), min_size=1, max_size=6),
    st.integers(0, 20),
    st.randoms(use_true_random=False),
)
def test_micro_batches_are_assigned_once_after_any_loss(
    data_order: DataOrder, shares: list[float], step: int, random
) -> None:  # type: ignore[no-untyped-def]
    batches = data_order.micro_batches(step)
    members = list(range(len(shares)))
    held: dict[int, set[int]] = {member: set() for member in members}
    speeds = dict(enumerate(shares))
    for _ in range(30):
        claimed = {place: frozenset(held[member]) for place, member in enumerate(members)}
        assigned = assign_micro_batches(batches, claimed, [speeds[member] for member in members])
        assert assigned == assign_micro_batches(batches, claimed, [speeds[member] for member in members])
        everything = sorted(
            [*(unit for units_of in claimed.values() for unit in units_of), *sum(assigned, ())]
        )
        assert everything == [batch.number for batch in batches], "each exactly once"
        # Some micro-batches are finished, then a worker may die or join.
        for place, member in enumerate(members):
            held[member] |= set(assigned[place][: random.randint(0, len(assigned[place]))])
        if len(members) > 1 and random.random() < 0.5:
            del held[members.pop(random.randrange(len(members)))]
        if random.random() < 0.3:
            joining = max([*members, *speeds]) + 1
            speeds[joining] = random.uniform(0.1, 8.0)
            held[joining] = set()
            members.append(joining)
        if all(
            set(assigned[place]) <= held.get(member, set())
            for place, member in enumerate(members[: len(assigned)])
        ):
            break


def test_assignment_follows_the_shares() -> None:
    data_order = DataOrder(10_000, 1024, 8, seed=1)
    assigned = assign_micro_batches(data_order.micro_batches(0), {}, [1.0, 1.0, 0.5, 0.25])
    counts = [len(units) for units in assigned]
    total = sum(counts)
    assert total == 128
    numpy.testing.assert_allclose(
        [count / total for count in counts], [4 / 11, 4 / 11, 2 / 11, 1 / 11], atol=0.01
    )


def test_member_above_its_share_gets_no_more() -> None:
    batches = DataOrder(100, 100, 10, seed=1).micro_batches(0)
    assigned = assign_micro_batches(batches, {0: frozenset(range(8))}, [1.0, 1.0])
    assert assigned == ((), (8, 9))
