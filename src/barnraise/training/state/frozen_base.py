"""Frozen base of one worker: the tensors that are not state, their hashes, and detection of changes.

The hashes are computed once, by a thread. A change is noticed by torch's version counter, or by a few numbers
of each tensor, because assignments through ``.data`` do not count. The hash then tells whether the contents
differ. Small tensors are compared in full.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from barnraise.checkpoint.serialization import tensor_bytes
from barnraise.checkpoint.tensor_hash import hash_tensor, plain
from barnraise.core.errors import RunError
from barnraise.core.units import format_size
from barnraise.training.state.model_tensors import tensors_of
from barnraise.training.state.trained_set import (
    MOST_NAMED,
    BaseDescription,
    Origin,
    OwnTensors,
    TensorFacts,
    initial_state,
    merge,
    set_digest,
)

log = logging.getLogger("barnraise.training")

_SMALL_BYTES = 4096
_SAMPLE = 16  # numbers of each large tensor
_REPORT_S = 3.0
_STOP_S = 10.0


class _Mark(NamedTuple):
    """Memory of a tensor, by which a change is noticed. ``content``: all bytes of a small tensor."""

    stamp: tuple[object, ...]
    content: bytes | None
    sample: torch.Tensor | None  # a view
    sampled: bytes


class FrozenBase:
    """Tensors of a model that are represented by hashes; empty if no parameter is frozen.

    ``may_differ``: the base of other workers may be stored differently, so hashes are not compared.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: Iterable[torch.nn.Parameter],
        statistics: Collection[int] = (),
        *,
        may_differ: bool = False,
    ) -> None:
        self._model, self.may_differ = model, may_differ
        owned = {id(parameter) for parameter in trained}
        tensors = tensors_of(model, keep_vars=True)
        self._trained = tuple(name for name, tensor in tensors.items() if id(tensor) in owned)
        self._unfrozen: dict[str, torch.nn.Parameter] = {}  # trained, but frozen at first; in order
        # For parameters that are in an optimizer, but frozen: which they are, and how they are trained.
        self.held: Callable[[], Sequence[torch.nn.Parameter]] = lambda: ()
        self.train_more: Callable[[Sequence[torch.nn.Parameter]], None] = lambda parameters: None
        facts = [
            TensorFacts(
                name,
                isinstance(tensor, torch.nn.Parameter),
                id(tensor) in owned,
                id(tensor) in statistics,
                _memory_of(tensor),
            )
            for name, tensor in tensors.items()
        ]
        self.origins: dict[str, Origin] = initial_state(facts)
        self.names = {name for name in tensors if name not in self.origins}
        self.moved: set[str] = set()
        self._marks = {name: _mark(tensors[name]) for name in self.names}
        self._hashes: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._has_warned = False

    @property
    def has_frozen_parameters(self) -> bool:
        """Return True if a parameter was frozen when `prepare` was called."""
        return bool(self._marks)

    def start_hashing(self) -> None:
        """Start to compute the hashes in the background; do nothing if that was done or the base is empty."""
        if self._thread is not None or not self.names:
            return
        tensors = tensors_of(self._model, keep_vars=True)
        own = {name: tensors[name] for name in tensors if name in self.names}
        self._thread = threading.Thread(
            target=self._hash_all, args=(own,), name="barnraise-base", daemon=True
        )
        atexit.register(self.close)
        self._thread.start()

    def log_statement(self) -> None:
        """Log what it means that the base may differ, if there is one."""
        if self.may_differ and self.names:
            log.warning(
                "the frozen base may differ between machines and is not compared: the trained parameters "
                "stay equal on all machines, but their values depend on which machine computes which samples"
            )

    def close(self) -> None:
        """Stop the thread: with torch on its stack it would abort the interpreter at exit."""
        self._is_stopped = True
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def hashes(self) -> dict[str, str]:
        """Return the hashes of the base as it was in `prepare`; wait until they are computed."""
        self.start_hashing()
        if self._thread is not None:
            while self._thread.is_alive():  # the thread says what it does
                self._thread.join(_REPORT_S)
        if self._failure is not None:
            raise RunError(f"the frozen base cannot be hashed: {self._failure}") from self._failure
        return self._hashes

    def describe(self) -> dict[str, object] | None:
        """Return what a state says of the base: None without one."""
        if not self._marks:
            return None
        hashes = None
        if not self.may_differ:
            known = self.hashes()
            hashes = {name: known[name] for name in known if name in self.names}
        unfrozen = {name: parameter.requires_grad for name, parameter in self._unfrozen.items()}
        return {"hashes": hashes, "trained": list(self._trained), "unfrozen": unfrozen}

    # unfrozen parameters

    def held_names(self) -> dict[str, torch.nn.Parameter]:
        """Return the frozen parameters in an optimizer, by name."""
        held = {id(parameter) for parameter in self.held()}
        tensors = tensors_of(self._model, keep_vars=True) if held else {}
        return {
            name: tensor
            for name, tensor in tensors.items()
            if id(tensor) in held and isinstance(tensor, torch.nn.Parameter)
        }

    def unfreeze(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Make frozen parameters trained ones. All workers call it at the same commit."""
        if not parameters:
            return
        held = self.held_names()
        # In the order of the layout, which a worker that loads this state repeats.
        names = {name: held[name] for parameter in parameters for name in held if held[name] is parameter}
        self.train_more(parameters)
        self._trained += tuple(names)
        self._unfrozen |= names
        self.names.difference_update(names)
        self.moved.update(names)
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        log.warning("%s%s was unfrozen and is trained from the next step on", min(names), more)

    def follow(self, described: BaseDescription | None) -> None:
        """Train what the sender of a state has unfrozen, and set ``requires_grad`` as it has."""
        for name, is_trained in (described.unfrozen if described is not None else {}).items():
            held = self.held_names()
            if name in held:
                self.unfreeze([held[name]])
            if name in self._unfrozen:
                self._unfrozen[name].requires_grad_(is_trained)

    # changes

    def refresh(self) -> dict[str, torch.Tensor]:
        """Find tensors of the base that have changed: they are state from now on. Return all that is state.

        A change that torch did not count may be one of many, so all are hashed again.
        """
        tensors = tensors_of(self._model, keep_vars=True)
        if not self.names:
            return tensors
        suspects = {name for name in self.names if self._is_suspect(name, tensors.get(name))}
        if self._has_other_samples(suspects):
            self._warn_of_uncounted()
            suspects = set(self.names)
        changed = []
        for name in sorted(suspects):
            tensor = tensors.get(name)
            if tensor is not None and not self._has_changed(name, tensor):
                self._marks[name] = _mark(tensor)
                continue
            changed.append(name)
        self._add_to_state(changed)
        return {name: tensor for name, tensor in tensors.items() if name not in self.names}

    def _add_to_state(self, changed: list[str]) -> None:
        if not changed:
            return
        self.names.difference_update(changed)
        self.moved.update(changed)
        for name in changed:  # a replaced tensor shall not stay in memory
            self._marks[name] = self._marks[name]._replace(sample=None)
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        log.warning(
            "%s%s was frozen and has changed: it is part of the training state from now on", changed[0], more
        )

    def _warn_of_uncounted(self) -> None:
        if not self._has_warned:
            log.warning(
                "the script changes frozen tensors in a way that torch does not count, such as through "
                ".data, so the whole base is hashed again; use copy_() under torch.no_grad() instead"
            )
        self._has_warned = True

    def _is_suspect(self, name: str, tensor: torch.Tensor | None) -> bool:
        mark = self._marks[name]
        if tensor is None:
            return True
        if mark.content is not None:
            return _content(tensor) != mark.content
        return _stamp(tensor) != mark.stamp

    def _has_other_samples(self, suspects: Collection[str]) -> bool:
        """Tell whether a sample of a tensor that seems unchanged has changed."""
        kinds: dict[tuple[torch.dtype, torch.device], list[_Mark]] = {}
        for name in self.names.difference(suspects):
            mark = self._marks[name]
            if mark.sample is not None:
                kinds.setdefault((mark.sample.dtype, mark.sample.device), []).append(mark)
        # One copy from a device for each kind, not one for each tensor.
        return any(
            bytes(tensor_bytes(torch.cat([mark.sample for mark in marks if mark.sample is not None])))
            != b"".join(mark.sampled for mark in marks)
            for marks in kinds.values()
        )

    def _has_changed(self, name: str, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor has other contents than in `prepare`; unknown contents have changed."""
        if self._marks[name].content is not None:
            return _content(tensor) != self._marks[name].content
        if self._thread is None:
            return True
        known = self.hashes().get(name)
        return known is None or hash_tensor(tensor) != known

    # other states

    def state_digest(self) -> bytes:
        """Return a hash of the names of the state as it is now; empty without a base."""
        return set_digest(self.refresh()) if self._marks else b""

    def named_changes(self) -> tuple[str, ...]:
        """Return the first names that became state since `prepare`, for the others' messages."""
        return tuple(sorted(self.moved)[:MOST_NAMED])

    def check_received(
        self,
        received: dict[str, torch.Tensor],
        described: BaseDescription | None,
        *,
        source: str,
        is_checkpoint: bool,
    ) -> frozenset[str]:
        """Return the base with a received state, before that is loaded. Raise RunError if it does not fit."""
        tensors = tensors_of(self._model, keep_vars=True)

        def own_hash(name: str) -> str:
            known = self.hashes().get(name) if name in self.names else None
            return known if known is not None else hash_tensor(tensors[name])

        names = frozenset(tensors)
        own = OwnTensors(
            names,
            frozenset(self.names),
            frozenset(self.moved),
            self._trained,
            self.may_differ,
            frozenset(self.held_names()),
        )
        base = merge(own, received.keys(), described, own_hash, source=source, is_checkpoint=is_checkpoint)
        if is_checkpoint:  # of a training that had more state, or of an earlier version
            base |= {
                name for name in own.base & received.keys() if hash_tensor(received[name]) == own_hash(name)
            }
        return base

    def adopt(self, base: frozenset[str]) -> None:
        """Use this base from now on; `check_received` returned it."""
        if not self._marks:
            return
        tensors = tensors_of(self._model, keep_vars=True)
        self._marks.update({name: _mark(tensors[name]) for name in base - self.names})
        self.moved = (self.moved | (self.names - base)) - base
        self.names = set(base)

    # the thread

    def _hash_all(self, tensors: dict[str, torch.Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        start, has_reported = time.monotonic(), False
        try:
            for name, tensor in tensors.items():
                if not has_reported and time.monotonic() - start > _REPORT_S:
                    has_reported = True
                    log.warning("hashing the frozen base (%s) ...", format_size(size))
                digest = hash_tensor(tensor, lambda: self._is_stopped)
                if self._is_stopped:
                    self._failure = RuntimeError("the process ends")
                    return
                if not _has_moved_on(tensor, self._marks[name]):  # else its first contents are unknown
                    self._hashes[name] = digest
        except Exception as error:  # noqa: BLE001  # of a tensor of an unknown kind; a waiting thread raises it
            self._failure = error
        unknown = [name for name, digest in self._hashes.items() if not digest]
        if unknown and not self.may_differ:
            log.warning(
                "%d frozen tensors have no bytes here (such as %s), so they are not compared with those of "
                "other machines",
                len(unknown),
                unknown[0],
            )


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the one after its last; the same if it has no memory."""
    try:
        first = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return 0, 0
    if not first or not tensor.numel() or tensor.layout != torch.strided:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((length - 1) * stride for length, stride in steps)
    return first, first + count * tensor.element_size()


def _stamp(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what differs after most changes, without a look at the contents."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, _memory_of(tensor), tensor.dtype, tuple(tensor.shape), tensor.device


def _content(tensor: torch.Tensor) -> bytes | None:
    """Return all bytes of a small tensor, None of another one."""
    own = plain(tensor)
    if own is None or own.layout != torch.strided or own.device.type == "meta":
        return None
    if own.numel() * own.element_size() > _SMALL_BYTES:
        return None
    return bytes(tensor_bytes(own))


def _mark(tensor: torch.Tensor) -> _Mark:
    content = _content(tensor)
    sample = None if content is not None else _sample(tensor)
    return _Mark(_stamp(tensor), content, sample, b"" if sample is None else bytes(tensor_bytes(sample)))


def _has_moved_on(tensor: torch.Tensor, mark: _Mark) -> bool:
    """Tell whether a tensor has changed, as far as torch's counter and a sample show."""
    if mark.content is not None:
        return _content(tensor) != mark.content
    return _stamp(tensor) != mark.stamp or (
        mark.sample is not None and bytes(tensor_bytes(mark.sample)) != mark.sampled
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of some numbers in the middle of a large tensor."""
    own = plain(tensor)
    if own is None or own.layout != torch.strided or own.device.type == "meta" or not own.numel():
        return None
    if own.is_conj() or own.is_neg():
        return None
    while own.dim() > 1:
        own = own[len(own) // 2]
    row = own[:_SAMPLE]
    return row.view(torch.uint8) if row.stride(0) == 1 else row  # torch cannot join rows of every dtype
