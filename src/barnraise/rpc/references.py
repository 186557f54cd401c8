"""References to objects that stay on the worker which made them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from barnraise.core.errors import RunError
from barnraise.rpc.messages import ReferenceId

DEFAULT_TIMEOUT_S = 60.0
_pin_lock = threading.Lock()


class ReferenceKeeper(Protocol):
    """The part of an endpoint that references use."""

    def fetch(self, reference: RemoteReference, timeout_s: float) -> Any:
        """Return the value of the object."""

    def drop(self, identity: ReferenceId) -> None:
        """Release one lease, soon and without waiting. A destructor may call it."""


class RemoteReference:
    """Reference to an object of one worker, its owner. The object lives while any worker holds a reference.

    It can be an argument or the result of a remote call, by itself. It is released by `release`, at the end
    of a ``with`` block, by the garbage collector, at ``rpc.stop``, and by the loss of this worker.
    """

    __slots__ = ("__weakref__", "_identity", "_is_held", "_keeper", "_pins")

    def __init__(self, keeper: ReferenceKeeper, identity: ReferenceId) -> None:
        self._keeper, self._identity = keeper, identity
        self._is_held, self._pins = True, 0

    @property
    def owner(self) -> int:
        """Return the rank of the worker that has the object."""
        return self._identity.owner

    @property
    def identity(self) -> ReferenceId:
        """Return owner and number of the object."""
        return self._identity

    def fetch(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Return the object on its owner, and a copy of it on any other worker."""
        self.pin()
        try:
            return self._keeper.fetch(self, timeout_s)
        finally:
            self.unpin()

    def release(self) -> None:
        """Release the reference, once no message with it is under way. Calling it twice is safe."""
        with _pin_lock:
            is_due = self._is_held and not self._pins
            self._is_held = False
        if is_due:
            self._keeper.drop(self._identity)

    def pin(self) -> None:
        """Defer a release until `unpin`. Raise RunError if the reference was released."""
        with _pin_lock:
            if self._is_held:
                self._pins += 1
                return
        raise RunError(
            f"the reference to an object of rank {self.owner} was released here",
            hint="Release it after its last use.",
        )

    def unpin(self) -> None:
        """End what `pin` began."""
        with _pin_lock:
            self._pins -= 1
            is_due = not self._is_held and not self._pins
        if is_due:
            self._keeper.drop(self._identity)

    def __enter__(self) -> RemoteReference:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __reduce__(self) -> Any:
        raise RunError(
            "a remote reference can be neither copied nor pickled",
            hint="Pass it to another worker as an argument of a remote call, by itself.",
        )

    def __repr__(self) -> str:
        state = "" if self._is_held else ", released"
        return f"<RemoteReference {self._identity.serial} of rank {self.owner}{state}>"

    def __del__(self) -> None:
        if getattr(self, "_is_held", False):
            self._is_held = False
            self._keeper.drop(self._identity)


def pin_all(references: Sequence[RemoteReference]) -> None:
    """Pin all of these references, or none. Raise RunError if one was released."""
    for place, reference in enumerate(references):
        try:
            reference.pin()
        except RunError:
            for pinned in references[:place]:
                pinned.unpin()
            raise
