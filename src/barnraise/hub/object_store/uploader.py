"""Uploads a hub's blobs to an object store, so that members download them there.

The hub's disk is authoritative: rounds are committed whether or not the store works. New blobs are uploaded
in the background. The hub serves what is not in the store yet, and everything while the store is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from typing import Literal, NamedTuple, TypeVar

from barnraise.core.errors import StoreAway
from barnraise.core.flow.backoff import Backoff, BackoffTimer
from barnraise.core.flow.events import ChangeEvent
from barnraise.core.flow.supervised_task import run_until_done
from barnraise.core.units import counted
from barnraise.hub.object_store.s3 import LINK_S, MOST_BYTES, S3Bucket
from barnraise.hub.server.health import HealthWarning
from barnraise.hub.server.hub import Hub
from barnraise.hub.storage.versions import shared_blobs

logger = logging.getLogger(__name__)
T = TypeVar("T")

_BACKOFF = Backoff(1.0, 300.0)
_LIST_AGAIN_S = 3600.0  # others may have removed something
_LINK_KEPT_S = LINK_S / 2
_PATIENCE_S = 10.0  # that a member waits for a blob on its way, if it will be there by then
_FIRST_RATE = 1 << 20  # bytes per second, before any were measured
_TOLD_S = 600.0  # that such a trouble is shown
_CHECK = "If it lasts, see that keys, region and endpoint are right and may list, put, get and delete there."
_SIGNING_S = 2.0  # time to sign a link; credentials of an instance role may have to be fetched


class UploadPlan(NamedTuple):
    """The next operation on the bucket."""

    verb: Literal["put", "remove"]
    name: str


def next_upload(wanted: Sequence[str], there: Set[str]) -> UploadPlan | None:
    """Return the next blob to upload; if none is missing, the next one to delete.

    None if there is neither.
    """
    for name in wanted:
        if name not in there:
            return UploadPlan("put", name)
    strays = there - set(wanted)
    return UploadPlan("remove", min(strays)) if strays else None


def is_worth_waiting(size: int, bytes_s: float) -> bool:
    """Tell whether an upload will finish soon; otherwise the hub serves the blob itself."""
    return size <= bytes_s * _PATIENCE_S


class _Link(NamedTuple):
    url: asyncio.Future[str]
    made: float


class BucketUploader:
    """Background upload of one hub's blobs to one bucket. Lives in the hub's event loop."""

    def __init__(self, hub: Hub, bucket: S3Bucket) -> None:
        self.origin = bucket.origin
        self._hub, self._bucket = hub, bucket
        self._there: set[str] = set()
        self._left_out: set[str] = set()  # for the hub alone
        self._listed: float | None = None
        self._links: dict[str, _Link] = {}
        self._backoff = BackoffTimer(_BACKOFF)
        self._is_away = False  # then members are not redirected
        self._putting: str | None = None
        self._rate = float(_FIRST_RATE)  # of the last put
        self._changed = ChangeEvent()

    @property
    def size(self) -> int:
        """Return the number of blobs in the bucket."""
        return len(self._there)

    async def link(self, name: str) -> str | None:
        """Return a link to the blob in the store; None if it is not there and will not be soon."""
        if self._is_away or not (name in self._there or await self._wait_for_upload(name)):
            return None
        now, known = self._hub.now(), self._links.get(name)
        if known is None or now - known.made > _LINK_KEPT_S:
            known = self._links[name] = _Link(_in_thread(lambda: self._bucket.link(name)), now)
        try:
            left = max(0.0, known.made + _SIGNING_S - now)
            return await asyncio.wait_for(asyncio.shield(known.url), left)
        except TimeoutError:
            return None
        except StoreAway as error:
            self._links.pop(name, None)
            words = f"members are not redirected to the store at {self.origin}: {error.message}"
            self._hub.health.warn("store-links", HealthWarning(words, _hint(error), now + _TOLD_S))
            return None

    async def _wait_for_upload(self, name: str) -> bool:
        """Wait for the upload of a new version.

        All members request it right after its commit, when its upload is still running.
        """
        size = self._size(name)
        is_next = self._putting in (None, name) and self._next_upload() == UploadPlan("put", name)
        if size is None or not is_next or not is_worth_waiting(size, self._rate):
            return False
        until = self._hub.now() + _PATIENCE_S
        while name not in self._there and not self._is_away and (left := until - self._hub.now()) > 0:
            await self._changed.wait(left)
        return name in self._there

    async def run(self) -> None:
        """Keep the bucket in sync while the hub runs."""
        await run_until_done(self._turn, "the store could not be synchronized", _BACKOFF.max_s)

    async def _turn(self) -> bool:
        try:
            if self._listed is None or self._hub.now() - self._listed > _LIST_AGAIN_S:
                await self._list()
            await self._hub.wait_until(lambda: self._next_upload() is not None, _LIST_AGAIN_S)
            if (todo := self._next_upload()) is not None:
                await (self._put(todo.name) if todo.verb == "put" else self._remove(todo.name))
        except StoreAway as error:
            self._is_away = True
            self._changed.announce()
            words = (
                f"the store at {self.origin} failed: {error.message}; the hub serves its blobs and retries"
            )
            self._hub.health.warn("store", HealthWarning(words, _hint(error)))
            await asyncio.sleep(self._backoff.next_wait())
            return False
        self._hub.health.resolve("store", f"the store at {self.origin} works again")
        self._is_away = False
        self._backoff.reset()
        return False

    def _wanted(self) -> list[str]:
        return shared_blobs(self._hub.versions, self._hub.founding.blobs)

    def _next_upload(self) -> UploadPlan | None:
        return next_upload([name for name in self._wanted() if name not in self._left_out], self._there)

    async def _list(self) -> None:
        wanted = set(self._wanted())

        def sound() -> set[str]:
            """List the bucket, without blobs of the wrong size: those are uploaded again."""
            listed = self._bucket.names()
            return {name for name, size in listed.items() if name not in wanted or size == self._size(name)}

        self._there = await _in_thread(sound)
        self._listed = self._hub.now()
        logger.info("%s in the store at %s", counted(len(self._there), "blob"), self.origin)

    def _size(self, name: str) -> int | None:
        try:
            return self._hub.blobs.path(name).stat().st_size
        except FileNotFoundError:
            return None

    async def _remove(self, name: str) -> None:
        """Delete a blob that the hub does not need.

        A failed deletion costs only storage, and is retried with the next listing.
        """
        try:
            await _in_thread(lambda: self._bucket.remove(name))
        except StoreAway as error:
            words = f"blobs cannot be deleted from the store at {self.origin}: {error.message}"
            self._hub.health.warn(
                "store-removals", HealthWarning(words, _hint(error), self._hub.now() + _TOLD_S)
            )
        self._there.discard(name)
        self._links.pop(name, None)

    async def _put(self, name: str) -> None:
        size, path = self._size(name), self._hub.blobs.path(name)
        if size is None or size > MOST_BYTES:
            self._left_out.add(name)
            why = "swept" if size is None else "too large"
            logger.info("the blob %s is %s, and not put into the store", name[:12], why)
            return
        self._putting, begin = name, self._hub.now()
        try:
            await _in_thread(lambda: self._bucket.put(name, path))
            self._there.add(name)
            self._rate = size / max(1e-3, self._hub.now() - begin)
        except FileNotFoundError:  # swept meanwhile
            pass
        finally:
            self._putting = None
            self._changed.announce()


def _hint(error: StoreAway) -> str:
    return _CHECK if error.hint == StoreAway.default_hint else error.hint


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run work in a thread that does not delay the hub's shutdown, because a store may block for a minute."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Future[T]) -> None:
        if done.done():
            return
        if error := outcome.exception():
            done.set_exception(error)
        else:
            done.set_result(outcome.result())

    def run() -> None:
        outcome: Future[T] = Future()
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001  # passed to the awaiting task
            outcome.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="hub-store", daemon=True).start()
    return done
