"""How the members of a training stay together: at every step exactly, encoded, or by rounds of local steps.

The first member's word decides. It travels in the sum of a step, so whoever holds that sum knows it, and all
change at the same commit.
"""

from __future__ import annotations

import msgspec
import torch

from barnraise.compression import NAMES, Codec, PowerSGD, codec_named
from barnraise.core.errors import ConfigError

NUMBERS = 6  # that a sum has for it
_EXACT = "exact"
_LONGEST = 100_000


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """``period`` steps make a round; of one step, it is synchronous training."""

    period: int = 1
    codec: str = _EXACT
    inner: int = 0  # samples of a local step
    rate: float = 0.7  # with which the mean change of a round is applied
    momentum: float = 0.0
    decay: float = 1.0  # of what a codec lost, until the next time

    def __post_init__(self) -> None:
        if self.codec != _EXACT and self.codec not in NAMES:
            raise ConfigError(
                f"there is no codec {self.codec!r}", hint=f"Take one of: {', '.join((_EXACT, *NAMES))}."
            )
        if not 1 <= self.period <= _LONGEST or not self.inner >= 0:
            raise ConfigError(
                f"a round cannot have {self.period} steps", hint=f"Take a period from 1 to {_LONGEST}."
            )
        if not (0 < self.rate <= 10 and 0 <= self.momentum < 1 and 0 <= self.decay <= 1):
            raise ConfigError(
                f"a round's change cannot be applied with rate {self.rate} and momentum {self.momentum}",
                hint="Take a rate such as 0.7, and a momentum and a decay from 0 to 1.",
            )

    @property
    def is_local(self) -> bool:
        return self.period > 1

    @property
    def is_encoded(self) -> bool:
        return self.codec != _EXACT

    def dealt(self, batch: int, members: int) -> Sync:
        """With local steps of a size for so many members, if none was given."""
        if not self.is_local or self.inner:
            return self
        return msgspec.structs.replace(self, inner=max(1, batch // members))

    def made_codec(self) -> Codec | PowerSGD:
        return codec_named(self.codec)

    def numbers(self) -> torch.Tensor:
        codec = 1 + NAMES.index(self.codec) if self.is_encoded else 0
        values = [self.period, codec, self.inner, self.rate, self.momentum, self.decay]
        return torch.tensor(values, dtype=torch.float64)

    @classmethod
    def read(cls, numbers: torch.Tensor) -> Sync | None:
        """None: nothing was said, or what was is no word: every member adds to the sum, also a guest."""
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

    def sentence(self) -> str:
        form = f"sent as {self.codec}" if self.is_encoded else "sent exactly"
        if not self.is_local:
            return f"every step is summed, gradients are {form}"
        return (
            f"rounds of {self.period} steps: members train by themselves in batches of {self.inner} samples, "
            f"the mean of what they changed is {form} and applied with rate {self.rate:g}, "
            f"momentum {self.momentum:g}"
        )


def heard(sync: Sync, coming: Sync | None, word: Sync | None) -> tuple[Sync | None, Sync | None]:
    """What is adopted at a commit, and what will be at the next, if anything.

    ``coming``: what was to be adopted now; ``word``: what the first member said with the sum of this commit.
    In rounds it is adopted one commit later: members may have begun with the next round already.
    """
    if coming is not None or word is None or word == sync:
        return coming, None
    return (None, word) if sync.is_local else (word, None)
