"""Batches of a script's loop: one iteration is one step, on every worker.

A batch is iterable over this worker's micro-batches of the step. Their number differs between workers, and
from step to step. So they have a loop of their own::

    for batch in batches:
        for x, y in batch:
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from barnraise.core.errors import RunError
from barnraise.training.recovery.out_of_memory import MicroBatchPart

if TYPE_CHECKING:
    from barnraise.training.session import Session

TWO_LOOPS = "Write two loops: `for batch in batches:`, and inside it `for x, y in batch:`."
_USED = "a batch has several micro-batches, and was used like one of them"


class Batches:
    """Iterable over the steps of an epoch; each pass is the next epoch, and a committed epoch is empty."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __len__(self) -> int:
        """Return the steps of an epoch. Raise TypeError for a stream."""
        return len(self._session._data)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._session.next_epoch
        self._session.next_epoch += 1
        yield from self._session.batches(epoch)


class Batch:
    """One step: an iterable over this worker's micro-batches of it. There may be none."""

    def __init__(self, session: Session, epoch: int, target: int) -> None:
        """Set the batch up; ``target``: the number of finished steps after it."""
        self._session, self._epoch, self._target = session, epoch, target
        self._is_finished = False

    def __iter__(self) -> Iterator[Any]:
        yield from self._session.microbatches(self._epoch, self._target)
        self._is_finished = True

    def __getitem__(self, _: object) -> NoReturn:
        """Raise RunError: the script has one loop where it needs two."""
        raise RunError(_USED, hint=TWO_LOOPS)

    def keys(self) -> NoReturn:
        """Raise RunError for ``model(**batch)``, which has one loop, too."""
        raise RunError(_USED, hint=TWO_LOOPS)

    def check_finished(self) -> None:
        """Raise RunError if the script has left the batch before its end."""
        if not self._is_finished:
            raise RunError(
                "the loop over a batch ended before its last micro-batch",
                hint=f"{TWO_LOOPS} Let the inner loop run to its end. To stop early, leave both loops.",
            )


class AssignedParts:
    """The parts of a worker's micro-batches that are left, with their data. Data is read ahead.

    ``key``: the step and the assignment that they belong to.
    """

    def __init__(
        self, key: tuple[int, int, int], parts: Sequence[MicroBatchPart], data: Iterator[Any]
    ) -> None:
        self.key = key
        self._parts, self._data = list(parts), data

    @property
    def is_left(self) -> bool:
        return bool(self._parts)

    def next(self) -> tuple[MicroBatchPart, Any]:
        """Return the next part and its data."""
        return self._parts.pop(0), next(self._data)
