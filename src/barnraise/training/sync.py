"""Synchronization of workers: exact, compressed, or in rounds of local steps (LocalSGD).

Rank 0 decides. Its choice is sent with the all-reduce of a step, so every worker that holds the result knows
it. All workers change at the same commit.
"""

from __future__ import annotations

import msgspec
import torch

from barnraise.compression import NAMES, Codec, PowerSGD, codec_named
from barnraise.core.errors import ConfigError

SYNC_NUMBERS = 6  # size of `Sync.to_tensor`
_EXACT = "exact"
_MAX_PERIOD = 100_000


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the synchronization. ``period`` steps form a round; with a period of 1 every step is
    synchronized.
    """

    period: int = 1
    codec: str = _EXACT
    inner: int = 0  # samples of a local step
    rate: float = 0.7  # outer learning rate, for the mean change of a round
    momentum: float = 0.0
    decay: float = 1.0  # of the error feedback, from one step to the next

    def __post_init__(self) -> None:
        if self.codec != _EXACT and self.codec not in NAMES:
            raise ConfigError(
                f"unknown codec {self.codec!r}", hint=f"Use one of: {', '.join((_EXACT, *NAMES))}."
            )
        if not 1 <= self.period <= _MAX_PERIOD or not self.inner >= 0:
            raise ConfigError(
                f"a round cannot have {self.period} steps", hint=f"Use a period from 1 to {_MAX_PERIOD}."
            )
        if not (0 < self.rate <= 10 and 0 <= self.momentum < 1 and 0 <= self.decay <= 1):
            raise ConfigError(
                f"a round's change cannot be applied with rate {self.rate} and momentum {self.momentum}",
                hint="Use a rate such as 0.7, and a momentum and a decay from 0 to 1.",
            )

    @property
    def is_local(self) -> bool:
        """Return True if workers train alone for several steps."""
        return self.period > 1

    @property
    def is_encoded(self) -> bool:
        """Return True if a codec compresses what is sent."""
        return self.codec != _EXACT

    def with_inner_batch(self, batch: int, workers: int) -> Sync:
        """Return a copy with a size of local steps that suits this number of workers, if none is set."""
        if not self.is_local or self.inner:
            return self
        return msgspec.structs.replace(self, inner=max(1, batch // workers))

    def make_codec(self) -> Codec | PowerSGD:
        """Build the codec of this name."""
        return codec_named(self.codec)

    def to_tensor(self) -> torch.Tensor:
        """Encode the settings as numbers, to be sent with an all-reduce."""
        codec = 1 + NAMES.index(self.codec) if self.is_encoded else 0
        values = [self.period, codec, self.inner, self.rate, self.momentum, self.decay]
        return torch.tensor(values, dtype=torch.float64)

    @classmethod
    def from_tensor(cls, numbers: torch.Tensor) -> Sync | None:
        """Decode the settings from numbers. Return None if nothing valid was sent; a guest may add any
        numbers.
        """
        period, codec, inner, rate, momentum, decay = numbers.tolist()
        if not period:
            return None
        try:
            return cls(
                period=int(period),
                codec=NAMES[int(codec) - 1] if codec else _EXACT,
                inner=int(inner),
                rate=rate,
                momentum=momentum,
                decay=decay,
            )
        except (ConfigError, IndexError, OverflowError, ValueError):
            return None

    def describe(self) -> str:
        """Describe the settings in a sentence, for the log."""
        form = f"sent as {self.codec}" if self.is_encoded else "sent uncompressed"
        if not self.is_local:
            return f"gradients are summed after every step, {form}"
        return (
            f"rounds of {self.period} steps: workers train alone in batches of {self.inner} samples, "
            f"the mean of their changes is {form} and applied with rate {self.rate:g}, "
            f"momentum {self.momentum:g}"
        )


def next_sync(sync: Sync, coming: Sync | None, proposed: Sync | None) -> tuple[Sync | None, Sync | None]:
    """Return the settings to apply at this commit, and those to apply at the next one, if any.

    ``coming``: settings that were due now. ``proposed``: settings that rank 0 sent with this commit. With
    local steps they are applied one commit later, because workers may have started the next round.
    """
    if coming is not None or proposed is None or proposed == sync:
        return coming, None
    return (None, proposed) if sync.is_local else (proposed, None)
