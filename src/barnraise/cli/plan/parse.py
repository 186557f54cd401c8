"""Parsers for options about a model and a plan; each error says what to write. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence

from barnraise.cli.plan.options import PlanOptions
from barnraise.core.errors import ConfigError
from barnraise.core.units import parse_duration
from barnraise.planning import (
    LOSSY,
    HypotheticalMachine,
    Levels,
    PlanCodec,
    PlanLimits,
    parse_machine,
    read_levels,
)

_COUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([kmbgt]?)", re.IGNORECASE | re.ASCII)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_MOST = 10**15
_MOST_FLOPS = 1e21


def machines_of(wishes: PlanOptions) -> list[HypotheticalMachine]:
    return [parse_machine(text) for text in wishes.add]


def options_of(wishes: PlanOptions) -> PlanLimits:
    return PlanLimits(sync=wishes.sync, levels=levels_of(wishes))


def check(wishes: PlanOptions) -> None:
    """Check the options before anything is measured. Raise ConfigError if no plan could satisfy them."""
    machines_of(wishes)
    options_of(wishes)
    if wishes.picture is not None and not wishes.picture.absolute().parent.is_dir():
        raise ConfigError(
            f"--picture {wishes.picture} is in a folder that does not exist",
            hint="Make the folder, or write it here: --picture plan.svg",
        )


def parse_count(text: str, what: str, example: str) -> int:
    """Parse ``124M``, ``1.3B``, ``350k``, ``10_000_000`` or ``7e9``; at least 1."""
    value = _number(text)
    if value is None or not 1 <= value <= _MOST:
        raise ConfigError(
            f"{what} {text!r} is not a number from 1 to 10^15", hint=f"Write it so: {what} {example}"
        )
    return round(value)


def parse_flops(text: str) -> float:
    """Parse the FLOPs of a sample, written like other counts."""
    value = _number(text)
    if value is None or not 0 < value <= _MOST_FLOPS:
        raise ConfigError(
            f"--flops-per-sample {text!r} is not a number of operations",
            hint="Write those of forward and backward so: --flops-per-sample 760G",
        )
    return value


def parse_seconds(text: str) -> float:
    """Parse seconds such as ``0.012`` or ``12ms``."""
    try:
        seconds = parse_duration(text if re.search("[a-zµ]", text, re.IGNORECASE) else f"{text}s")
    except ConfigError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(
            f"--seconds-per-sample {text!r} is not a time",
            hint="Write how long this machine trains one sample: --seconds-per-sample 12ms",
        )
    return seconds


def _number(text: str) -> float | None:
    match = _COUNT.fullmatch(text.strip())
    return None if match is None else float(re.sub("[_,]", "", match[1])) * _FACTORS[match[2].lower()]


def levels_of(wishes: PlanOptions, codecs: Sequence[PlanCodec] = LOSSY) -> Levels:
    if wishes.levels is None:
        return Levels()
    try:
        document = tomllib.loads(wishes.levels.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--levels {wishes.levels} cannot be read: {error}",
            hint="Name a TOML file with the tables [inside] and [across]; see docs/plans.md.",
        ) from error
    return read_levels(document, [codec.name for codec in codecs], wishes.sync)
