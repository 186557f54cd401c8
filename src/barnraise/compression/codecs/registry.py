"""Codecs by name, as in settings and plans: ``int8``, ``int8:block=128``, ``bf16+zlib``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from barnraise.compression.codecs.codec import Codec
from barnraise.compression.codecs.fp32 import Fp32
from barnraise.compression.codecs.half import Half
from barnraise.compression.codecs.int4 import Int4
from barnraise.compression.codecs.int8 import Int8
from barnraise.compression.codecs.powersgd import PowerSGD
from barnraise.compression.codecs.randomk import RandomK
from barnraise.compression.codecs.topk import TopK, TopKFp32
from barnraise.compression.codecs.zlib import ZlibCodec
from barnraise.core.errors import ConfigError

# Workers send the place of a codec in this order, so a new one stands last.
_MAKERS: Mapping[str, tuple[Callable[..., Codec | PowerSGD], tuple[str, ...]]] = {
    "fp32": (Fp32, ()),
    "fp16": (lambda: Half(torch.float16), ()),
    "bf16": (lambda: Half(torch.bfloat16), ()),
    "int8": (Int8, ("block",)),
    "int4": (Int4, ("block",)),
    "topk": (TopK.of, ("k", "block", "ratio")),
    "randomk": (RandomK, ("every", "seed")),
    "powersgd": (PowerSGD, ("rank", "seed")),
    "topk-fp32": (TopKFp32.of, ("k", "block", "ratio")),
}
NAMES = tuple(_MAKERS)
_PACKING = "zlib"
_MAX_DIGITS = 12
_SHARE = "ratio"
_DECIMAL = r"[01]?\.[0-9]{1,12}"


def codec_named(text: str) -> Codec | PowerSGD:
    """Create the codec of a name. Raise ConfigError that lists the valid names."""
    codec_text, *packings = text.strip().split("+")
    name, colon, parameter_text = codec_text.partition(":")
    if name not in _MAKERS:
        raise ConfigError(f"unknown codec {name!r}", hint=f"Choose one of {', '.join(NAMES)}.")
    make, allowed = _MAKERS[name]
    codec = make(**_parameters(name, parameter_text, allowed) if colon else {})
    if not packings:
        return codec
    if packings != [_PACKING] or isinstance(codec, PowerSGD):
        raise ConfigError(
            f"{text!r} does not name a codec",
            hint=f"Only +{_PACKING} may follow a codec, once, and not after powersgd.",
        )
    return ZlibCodec(codec)


def _parameters(name: str, parameter_text: str, allowed: tuple[str, ...]) -> dict[str, float]:
    parameters: dict[str, float] = {}
    takes = f"{name} takes {' and '.join(allowed)}" if allowed else f"{name} takes no parameters"
    for word in parameter_text.split(","):
        key, _, value = word.partition("=")
        if key not in allowed:
            raise ConfigError(f"{name} has no parameter {key!r}", hint=f"{takes}.")
        if key in parameters:
            raise ConfigError(f"{name} is given {key} twice", hint=f"Give {key} once.")
        is_share = key == _SHARE and re.fullmatch(_DECIMAL, value) is not None
        if not is_share and not (value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS):
            raise ConfigError(
                f"{key}={value} of {name} is not a {'share' if key == _SHARE else 'whole number'}",
                hint=f"Write it as in {name}:{key}={'0.01' if key == _SHARE else '64'}.",
            )
        parameters[key] = float(value) if is_share else int(value)
    return parameters
