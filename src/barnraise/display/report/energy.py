"""Energy of a run, and an estimate of its cost. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from barnraise.core.errors import ConfigError
from barnraise.display.charts.scale import short_number
from barnraise.history.sentences import counted
from barnraise.history.view import RunView

_PRICE = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([A-Za-z€$£¥]{1,8})\s*")
_J_PER_KWH = 3.6e6


@dataclass(frozen=True)
class EnergyPrice:
    """Price of one kilowatt-hour."""

    amount: float
    currency: str


def parse_price(text: str) -> EnergyPrice:
    """Parse a price such as ``0.30 EUR``. Raise ConfigError if the text is another one."""
    match = _PRICE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a price of a kilowatt-hour",
            hint="Write a number and a currency, such as 0.30 EUR.",
        )
    return EnergyPrice(float(match[1]), match[2])


def format_energy(joules: float | None) -> str:
    """Format an energy in watt-hours or kilowatt-hours; what was not measured is a dash."""
    if joules is None:
        return "–"
    hours = joules / 3600
    return f"{short_number(hours)} Wh" if hours < 1000 else f"{short_number(hours / 1000)} kWh"


def energy_sentences(view: RunView, price: EnergyPrice | None) -> list[str]:
    """Return what is known about the energy of a run, and what is not."""
    silent = [machine.name for machine in view.machines if machine.energy_j is None]
    measured = len(view.machines) - len(silent)
    if view.energy_j is None or not measured:
        return ["The power was not measured on any machine, so nothing is known about energy and cost."]
    sentences = [f"Measured: {format_energy(view.energy_j)} on {counted(measured, 'machine')}."]
    if silent:
        names = ", ".join(silent[:5]) + (" and others" if len(silent) > 5 else "")
        sentences.append(f"Not measured: {names}. The real energy is higher.")
    if price is None:
        sentences.append("No price of a kilowatt-hour was given, so there is no estimate of the cost.")
        return sentences
    cost = view.energy_j / _J_PER_KWH * price.amount
    rate = f"{price.amount:g} {price.currency} for a kilowatt-hour"
    sentences.append(f"Estimated cost: about {short_number(cost, 2)} {price.currency}, at {rate}.")
    sentences.append(
        "The estimate counts what the sensors of the machines report. Power supplies, screens and cooling "
        "use more."
    )
    return sentences
