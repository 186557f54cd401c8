"""Writer of a worker's entries: a queue, and a thread that empties it about once a second."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from barnraise.core.errors import BarnraiseError
from barnraise.history.entries import Entry
from barnraise.history.log_format import encode_frames, readable
from barnraise.history.logs.compaction import compact
from barnraise.history.step_rows import StepRow, ValueRow, step_batches, value_batches
from barnraise.training.record.sinks import RecordSink

log = logging.getLogger("barnraise.training")

_FLUSH_S = 1.0
_CLOSE_S = 5.0
_MOST_QUEUED = 100_000  # entries and rows of the time that one request takes
_MOST_WAITING = 2 << 20  # bytes of entries that wait for the agent; beyond it, their rows become coarser
_MAX_NODE = 32

Item = Entry | StepRow | ValueRow


def node_of(machine: str) -> bytes:
    """Return a machine of a group as the record names it. Groups without an agent use names, not keys."""
    try:
        return bytes.fromhex(machine)[:_MAX_NODE]
    except ValueError:
        return machine.encode()[:_MAX_NODE]


class EntryWriter:
    """Queue of entries and rows. Nothing happens before `start`.

    ``make_sink`` returns None if nothing can be written. What the sink does not take waits, and becomes
    coarser if the agent or a full disk takes nothing for long.
    """

    def __init__(self, make_sink: Callable[[], RecordSink | None]) -> None:
        self._make_sink = make_sink
        self._sink: RecordSink | None = None
        self._queue: deque[Item] = deque(maxlen=_MOST_QUEUED)
        self._waiting: list[Entry] = []
        self._sending = threading.Lock()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    @property
    def node(self) -> bytes | None:
        """Return the machine of this worker; None if nothing is written."""
        return self._sink.node if self._sink is not None else None

    @property
    def has_started(self) -> bool:
        """Return True after `start`."""
        return self._thread is not None

    def start(self, on_exit: Callable[[], None]) -> None:
        """Open the sink and start the thread. ``on_exit`` is called when the script ends."""
        self._sink = self._make_sink()
        self._thread = threading.Thread(target=self._run, name="barnraise-record", daemon=True)
        self._thread.start()
        atexit.register(on_exit)

    def put(self, item: Item) -> None:
        """Queue an entry or a row. May be called from any thread."""
        self._queue.append(item)

    def close(self) -> None:
        """Write the rest and close the sink; calling it again does nothing."""
        if self._thread is None or self._is_closing.is_set():
            return
        self._is_closing.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive() or self._sink is None:
            return
        try:
            self._send()
            self._sink.close()
        except (BarnraiseError, OSError) as error:
            self._warn(error)

    def flush(self) -> None:
        """Write what is queued now; may be called from any thread."""
        try:
            self._send()
        except (BarnraiseError, OSError) as error:
            self._warn(error)

    def _run(self) -> None:
        while not self._is_closing.wait(_FLUSH_S):
            self.flush()

    def _send(self) -> None:
        with self._sending:
            items = [self._queue.popleft() for _ in range(len(self._queue))]
            if self._sink is None:
                return
            self._waiting += readable(_entries(items))
            if not self._waiting:
                return
            try:
                self._sink.write(self._waiting)
            except (BarnraiseError, OSError):
                if len(encode_frames(self._waiting)) > _MOST_WAITING:
                    self._waiting = list(compact(self._waiting, _MOST_WAITING // 2))
                raise
            self._waiting = []

    def _warn(self, error: BarnraiseError | OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.info("the record of this run could not be written, and is tried again: %s", error)


def _entries(items: Sequence[Item]) -> list[Entry]:
    """Return events in their order, then steps and values in batches."""
    events = [item for item in items if not isinstance(item, StepRow | ValueRow)]
    steps = [item for item in items if isinstance(item, StepRow)]
    values = [item for item in items if isinstance(item, ValueRow)]
    return [*events, *step_batches(steps), *value_batches(values)]
