"""Settings that a person fixes for each level of the network; the rest is ``auto``. Pure.

There are two levels. ``inside`` means the machines of one site, or all machines if sites are not separate.
``across`` means one machine of each site. For example, as TOML::

    [across]
    codec = "int8"
    period = 32
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from barnraise.core.config import strategy_name
from barnraise.core.errors import ConfigError
from barnraise.planning.cost.quality_model import LONGEST_PERIOD
from barnraise.planning.inputs.codecs import CHOOSABLE, EXACT

AUTO = "auto"
VARIABLE = "BARNRAISE_LEVELS"  # passes the levels to a run's workers, as JSON
Sync = Literal["exact", "auto"]
Shape = Literal["ring", "tree", "star"]
Strategy = Literal["auto", "ring", "tree", "star"]
SHAPES: tuple[Shape, ...] = ("ring", "tree", "star")
Period = Annotated[int, Meta(ge=1, le=LONGEST_PERIOD)]


class Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one level: shape of each operation, codec, and steps of a round.

    A ``ring`` to or from one machine is a chain.
    """

    all_reduce: Strategy = "auto"
    reduce: Strategy = "auto"
    broadcast: Strategy = "auto"
    codec: str = AUTO
    period: Period | Literal["auto"] = "auto"

    @property
    def is_open(self) -> bool:
        return self == Level()


class Levels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of both levels; nothing is fixed by default."""

    inside: Level = Level()
    across: Level = Level()

    def exact(self) -> Levels:
        """Return these settings with exact steps at both levels."""
        return Levels(inside=_exact(self.inside), across=_exact(self.across))


OPEN = Levels()


def read_levels(document: Mapping[str, Any], codecs: Iterable[str], sync: Sync = "exact") -> Levels:
    """Read the levels from a TOML table; raise ConfigError that names the mistake and the valid values."""
    names = (EXACT, *codecs)
    levels: dict[str, Level] = {}
    for name, table in document.items():
        _require_known(str(name), Levels.__struct_fields__, "level", "the plan's settings")
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"the level {name!r} must be a table of settings, not a value",
                hint=f"Write [{name}] on a line of its own and the settings below it.",
            )
        levels[name] = _read_level(name, table, names)
    result = Levels(**levels)
    _check_together(result, sync)
    return result


def decode_levels(text: str) -> Levels:
    """Decode the levels that `barnraise run` has checked and passed to its workers.

    Empty text means that nothing is fixed. Raise ConfigError if it is no JSON object of levels.
    """
    if not text:
        return OPEN
    try:
        document = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{VARIABLE} is no JSON object: {error}", hint="Use `barnraise run --levels levels.toml`."
        ) from error
    return read_levels(document, [codec.name for codec in CHOOSABLE], "auto")


def _exact(level: Level) -> Level:
    codec = level.codec if level.codec == AUTO else EXACT
    period: Literal["auto", 1] = "auto" if level.period == "auto" else 1
    return msgspec.structs.replace(level, codec=codec, period=period)


def _read_level(name: str, table: Mapping[str, Any], codecs: tuple[str, ...]) -> Level:
    named = {
        key: strategy_name(value) if isinstance(value, str) and key != "codec" else value
        for key, value in table.items()
    }
    for key, value in named.items():
        _require_known(str(key), Level.__struct_fields__, "setting", f"[{name}]")
        if key == "codec":
            _require_known(str(value), (AUTO, *codecs), "codec", f"[{name}]")
        elif key == "period":
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value != AUTO and not (whole and 1 <= value <= LONGEST_PERIOD):
                raise ConfigError(
                    f"[{name}] has the period {value!r}, which is not a number of steps",
                    hint=f"Write a whole number from 1 to {LONGEST_PERIOD}, or 'auto'.",
                )
        else:
            _require_known(str(value), (AUTO, *SHAPES), "strategy", f"[{name}] {key}")
    return msgspec.convert(named, Level)


def _check_together(levels: Levels, sync: Sync) -> None:
    for operation in ("reduce", "broadcast"):
        if getattr(levels.across, operation) != AUTO:
            raise ConfigError(
                f"[across] sets {operation}, but the leaders of sites use the shape of all_reduce "
                "for all operations",
                hint=f"Give all_reduce in [across], or {operation} in [inside].",
            )
    if levels.inside.codec not in (AUTO, EXACT) and not levels.across.is_open:
        raise ConfigError(
            f"[inside] has the codec {levels.inside.codec!r} although [across] is set: inside a site "
            "gradients are always exact if sites are treated separately",
            hint="Give the codec in [across], or remove that table to treat all machines alike.",
        )
    if levels.inside.period not in (AUTO, 1) and not levels.across.is_open:
        raise ConfigError(
            f"[inside] has rounds of {levels.inside.period} steps although [across] is set: inside a site "
            "every step is shared if sites are treated separately",
            hint="Give the period in [across], or remove that table to treat all machines alike.",
        )
    if sync != "exact":
        return
    for name, level in (("inside", levels.inside), ("across", levels.across)):
        lossy = [f"the codec {level.codec!r}"] if level.codec not in (AUTO, EXACT) else []
        lossy += [f"rounds of {level.period} steps"] if level.period not in (AUTO, 1) else []
        if lossy:
            raise ConfigError(
                f"[{name}] asks for {' and '.join(lossy)}, which changes the mathematics; sync is 'exact'",
                hint="Allow it with sync = 'auto', or remove the setting.",
            )


def _require_known(word: str, known: tuple[str, ...], what: str, place: str) -> None:
    if word in known:
        return
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    guess = f"Did you mean {nearest[0]!r}? " if nearest else ""
    raise ConfigError(
        f"{place} names the unknown {what} {word!r}", hint=f"{guess}Use one of {', '.join(known)}."
    )
