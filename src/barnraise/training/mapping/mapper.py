"""Maps of one session: ``run.map`` computes items on all workers, each item once.

A session without a model has a group for its maps alone; a worker that joins it gets the results of all maps
so far. In a session that trains, a map belongs to the step after which it is called. A worker that joins
there and does not call it follows it, before it computes a micro-batch.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from blake3 import blake3

from barnraise.core import metrics
from barnraise.core.errors import BarnraiseError, CollectiveError, RunError
from barnraise.core.metrics import catalogue
from barnraise.runs.commit import NO_MAP, MapKey
from barnraise.runs.sharding import micro_batch_seed
from barnraise.training.data.loader import preserved_rng, seed_all
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.group.interface import GroupManager
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.mapping.encoded_values import decode_value, encode_value
from barnraise.training.mapping.exchange import MapExchange
from barnraise.training.mapping.item_queue import LEFT, ItemFailure, ItemQueue
from barnraise.training.mapping.result_store import MAX_ITEMS, ResultStore
from barnraise.training.progress_report import ProgressReporter
from barnraise.training.record.map_recorder import MapRecorder
from barnraise.training.record.sinks import open_sink
from barnraise.training.recovery.failure_notice import install_failure_notice
from barnraise.training.recovery.failures import exit_without_state, raise_if_permanent
from barnraise.training.steps.background_task import BackgroundTask
from barnraise.training.steps.step_loop import StepLoop

log = logging.getLogger("barnraise.training")

_CLOSE_S = 5.0
_ITEM = 3  # purpose of a seed


class Mapper:
    """The maps of one worker. ``folder``: where results survive a restart of the run, or None."""

    def __init__(self, manager: GroupManager, seed: int, folder: Path | None) -> None:
        self._manager, self._seed, self._folder = manager, seed, folder
        self._step_loop: StepLoop | None = None
        self._stores: dict[MapKey, ResultStore] = {}
        self._next_key: MapKey = (0, 0)
        self._has_group = self._has_looped = self._is_followed_due = self._is_mapping = False
        self._progress: _MapProgress | None = None

    @property
    def has_mapped(self) -> bool:
        """Return True after the first map."""
        return self._next_key != (0, 0)

    def attach(self, step_loop: StepLoop) -> None:
        """Use the group of a training from now on. Raise RunError if there was a map without one."""
        if self.has_mapped:
            raise RunError(
                "run.prepare was called after run.map",
                hint="Call run.prepare first, or compute the items in a script of their own.",
            )
        self._step_loop = step_loop
        step_loop.on_group = self._on_group

    def start_epoch(self) -> None:
        """Note that this worker has reached the loop over the batches."""
        self._has_looped = True

    def map(self, function: Callable[[Any], Any], items: Any, step: int) -> list[Any]:
        """Return the results of all items, in order; ``step``: finished steps of the training."""
        if self._is_mapping:
            raise RunError("run.map was called within run.map", hint="Call it outside of the function.")
        items = _indexable(items)
        key = self._next_key = (step, self._next_key[1] + 1 if self._next_key[0] == step else 1)
        self._is_mapping = True
        try:
            with preserved_rng():
                task = _MapTask(self, function, items, key)
                return task.run_alone() if self._computes_alone() else self._map_in_group(task)
        finally:
            self._is_mapping = False

    def follow_if_due(self) -> None:
        """Follow a map of the others that this worker does not call, as it joined later."""
        while self._is_followed_due and self._step_loop is not None:
            try:
                self._follow()
            except CollectiveError as error:
                raise_if_permanent(error)
                self._step_loop.join_next_group(error)

    def find_store(self, key: MapKey, total: int, fingerprint: bytes) -> ResultStore:
        """Return the results of a map, empty if this worker has not seen it."""
        store = self._stores.get(key)
        if store is None or (store.total, store.fingerprint) != (total, fingerprint):
            store = self._stores[key] = ResultStore(total, fingerprint)
        return store

    def seed_item(self, key: MapKey, item: int) -> None:
        """Seed all generators by the item, so that the worker does not matter."""
        seed_all(micro_batch_seed(self._seed, key[0], item, _ITEM + (key[1] << 8)))

    # the group

    def _computes_alone(self) -> bool:
        loop, manager = self._step_loop, self._manager
        if isinstance(manager, SingleWorkerManager) and manager.world == 1:
            return True
        if loop is None or not loop.joined_late or self._has_looped:
            return False
        log.warning(
            "this worker joined the training later, so it computes the items of run.map at the script's "
            "beginning alone while the others wait; `if run.step == 0:` before run.map avoids that"
        )
        return True

    def _map_in_group(self, task: _MapTask) -> list[Any]:
        if self._step_loop is None:
            self._join_first_group()
        key, total, fingerprint = task.key, len(task.items), _fingerprint(task.items)
        if self._step_loop is not None:
            self._forget_other_steps(key[0])
        store = self._stores.get(key)
        if store is None:
            path = self._folder / f"{key[1]}.results" if self._folder and self._step_loop is None else None
            store = self._stores[key] = ResultStore(total, fingerprint, path)
        elif store.is_complete and (store.total, store.fingerprint) == (total, fingerprint):
            return task.results(store)  # this worker has followed it
        store = self.find_store(key, total, fingerprint)
        queue = ItemQueue()
        exchange = MapExchange(self._manager, key, queue, self.find_store, self._regrouper(queue))
        if self._progress is not None and total:
            self._progress.start(exchange, total)
        self._set_key(key)
        try:
            task.run(exchange, queue, store, fingerprint)
        finally:
            self._set_key(NO_MAP)
        return task.results(store)

    def abort_group(self) -> None:
        """Fail the pending operations, because the script leaves the map."""
        self._manager.group.abort()

    def name_of(self, rank: int) -> str:
        return self._manager.name_of(rank)

    def _set_key(self, key: MapKey) -> None:
        if self._step_loop is not None:
            self._step_loop.map_key = key
            self._is_followed_due = False

    def _forget_other_steps(self, step: int) -> None:
        """Drop the results of maps that no worker can need any more."""
        for key in [key for key in self._stores if key[0] != step]:
            self._stores.pop(key).close()

    def _join_first_group(self) -> None:
        """Join the group of the run, which this session uses for maps alone."""
        if self._has_group:
            return
        self._has_group = True
        if (worker := WorkerId.from_environment()) is not None:
            install_failure_notice(worker)
            self._progress = _MapProgress(
                self._manager, MapRecorder(lambda: open_sink(worker), self._manager)
            )
            self._progress.reporter = ProgressReporter(worker, self._progress, 1, "item")
        atexit.register(self._manager.close)
        atexit.register(self._send_results_at_exit)
        self._manager.wait_for_admission()
        self._manager.join_next_group(None)
        if self._manager.finished and not self._manager.is_first_start and self._manager.world == 1:
            exit_without_state(finished=True)

    def _send_results_at_exit(self) -> None:
        """Follow the maps of workers that joined after this one's last map, so that they get all results.

        No worker joins when another one has finished the script; the group then only gets smaller.
        """
        manager = self._manager
        if self._is_mapping or getattr(sys, "last_value", None) is not None:  # the script has failed
            return
        exchange = MapExchange(manager, NO_MAP, ItemQueue(), self.find_store, _refuse_to_regroup)
        while not manager.finished and manager.newest_generation() > manager.generation:
            log.info(
                "the group has changed after the last map: sending the results to workers that lack them"
            )
            manager.join_next_group(None)
            try:
                while manager.world > 1 and exchange.follow() not in (NO_MAP, self._next_key):
                    pass
            except BarnraiseError as error:
                log.info("the group failed at the end of the script: %s", error.message)

    def _regrouper(self, queue: ItemQueue) -> Callable[[CollectiveError | None], None]:
        """Return the function that joins the next group.

        A training's state is compared and sent by the computing thread, when the function does not use it.
        """

        def regroup(error: CollectiveError | None) -> None:
            loop = self._step_loop
            if queue.is_closed:
                raise CollectiveError(LEFT)
            if loop is None:
                self._manager.join_next_group(error)
            else:
                queue.call(lambda: loop.join_next_group(error))

        return regroup

    def _on_group(self, key: MapKey) -> None:
        """Note in a new group of a training which map its members are in; end it if it is over here."""
        assert self._step_loop is not None
        self._is_followed_due = False
        if key == NO_MAP or self._step_loop.map_key != NO_MAP:
            return
        self._is_followed_due = True
        store = self._stores.get(key)
        if store is not None and store.is_complete:
            self._follow()

    def _follow(self) -> None:
        MapExchange(self._manager, NO_MAP, ItemQueue(), self.find_store, _refuse_to_regroup).follow()
        self._is_followed_due = False


class _MapTask:
    """One call of ``run.map`` on this worker."""

    def __init__(
        self, mapper: Mapper, function: Callable[[Any], Any], items: Sequence[Any], key: MapKey
    ) -> None:
        self.items, self.key = items, key
        self._mapper, self._function = mapper, function
        self._error: Exception | None = None

    def run_alone(self) -> list[Any]:
        """Compute all items on this worker."""
        results = []
        for item in range(len(self.items)):
            try:
                results.append(decode_value(self._compute(item)))
            except Exception as error:  # noqa: BLE001 - the function may raise anything
                self._error = error
                self._raise_failed(ItemFailure(item, _sentence(error)), "")
        return results

    def run(self, exchange: MapExchange, queue: ItemQueue, store: ResultStore, fingerprint: bytes) -> None:
        """Compute the items that this worker gets, while results are exchanged in the background."""

        def work() -> None:
            try:
                exchange.run(store.total, fingerprint)
            finally:
                queue.end()

        task = BackgroundTask(work, "barnraise-map")
        try:
            while (item := queue.take()) is not None:
                if item in store:
                    queue.finish()
                    continue
                try:
                    store.add(item, self._compute(item))
                except Exception as error:  # noqa: BLE001 - the function may raise anything
                    self._error = error
                    queue.fail(_sentence(error))
                else:
                    queue.finish()
        finally:
            queue.close()
            if not task.has_ended:
                task.wait(0.2)
            if not task.has_ended:
                self._mapper.abort_group()
                task.wait(_CLOSE_S)
        task.result()
        if exchange.failed is not None:
            rank, failure = exchange.failed
            if queue.failure is None or queue.failure.item != failure.item:
                self._error = None
            self._raise_failed(failure, f" on {self._mapper.name_of(rank)}")

    def results(self, store: ResultStore) -> list[Any]:
        """Return the decoded results, in order."""
        return [decode_value(store.content(item)) for item in range(store.total)]

    def _compute(self, item: int) -> bytes:
        self._mapper.seed_item(self.key, item)
        result = encode_value(self._function(self.items[item]), f"the result of item {item}")
        metrics.counter(catalogue.ITEMS).inc()
        return result

    def _raise_failed(self, failure: ItemFailure, where: str) -> NoReturn:
        raise RunError(
            f"run.map: item {failure.item} failed{where}: {failure.sentence}",
            hint="The traceback of its function is in the output of the worker that computed it.",
        ) from self._error


class _MapProgress:
    """Progress of the maps of a session that does not train, as `ProgressReporter` reads it."""

    def __init__(self, manager: GroupManager, recorder: MapRecorder) -> None:
        self._manager, self._recorder = manager, recorder
        self._exchange: MapExchange | None = None
        self.total_steps: int | None = None
        self.history: list[dict[str, float]] = []
        self.reporter: ProgressReporter | None = None
        self._has_reported = False

    @property
    def done(self) -> int:
        return self._exchange.finished if self._exchange is not None else 0

    @property
    def is_main(self) -> bool:
        return self._manager.rank == 0

    def start(self, exchange: MapExchange, total: int) -> None:
        """Report the items of this map from now on."""
        self._exchange, self.total_steps = exchange, total
        self._recorder.start(total)
        exchange.on_round = self._note

    def _note(self) -> None:
        if self.reporter is not None:
            self.reporter()
        self._recorder.note(self.done)
        if self.done:
            self._manager.report_trained()


def _refuse_to_regroup(error: CollectiveError | None) -> None:
    raise AssertionError("the caller joins the next group")


def _indexable(items: Any) -> Sequence[Any]:
    """Return the items as a sequence; a dataset with a length is read item by item."""
    is_lazy = (
        hasattr(items, "__len__") and hasattr(items, "__getitem__") and not isinstance(items, Mapping | str)
    )
    sequence: Sequence[Any] = items if is_lazy else list(items)
    if len(sequence) > MAX_ITEMS:
        raise RunError(
            f"run.map got {len(sequence)} items; the limit is {MAX_ITEMS}", hint="Put several into one item."
        )
    return sequence


def _fingerprint(items: Sequence[Any]) -> bytes:
    """Hash the items of a list, to notice workers with other ones; empty if they are not plain data."""
    if not isinstance(items, list | tuple | range):
        return b""
    hasher = blake3()
    try:
        for item in items if not isinstance(items, range) else [str(items)]:
            hasher.update(blake3(encode_value(item, "an item")).digest())
    except RunError:
        return b""
    return hasher.digest()


def _sentence(error: Exception) -> str:
    if isinstance(error, RunError):
        return error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
