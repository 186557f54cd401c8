"""Transformers' Trainer and TRL's SFTTrainer in a session. One line of a script changes::

    from barnraise.integrations.transformers import Trainer  # instead of: from transformers import Trainer

``in_session`` does the same for a subclass of your own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from barnraise.core.errors import RunError
from barnraise.integrations.single_process import keep_accelerate_single

_HOMES = {"Trainer": "transformers", "SFTTrainer": "trl"}

keep_accelerate_single()


def in_session(trainer: type[Any]) -> type[Any]:
    """Return a subclass of a Trainer's class that trains in a session."""
    from barnraise.integrations.session_trainer import session_class

    return session_class(trainer)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        original = getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        raise RunError(f"{error.name} is not installed here", hint=f"pip install {home}") from error
    globals()[name] = value = in_session(original)
    return value
