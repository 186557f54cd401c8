"""Place of a model that ``barnraise run --model`` has sent, as its script asks for it."""

from __future__ import annotations

import os
import re

from barnraise.agent_client.run_options import DATA_NAME, DataSet
from barnraise.artifacts.models.huggingface_cache import cache_directory, find_snapshot, parse_reference
from barnraise.core.config import load_settings
from barnraise.core.errors import RunError


def model_path(name: str, *, alone: str | os.PathLike[str] | None = None) -> str:
    """Return the folder of the model ``name``, as ``barnraise run --model NAME=...`` has sent it.

    Under plain ``python`` it is the folder, or the model of this machine's Hugging Face cache, that the
    variable BARNRAISE_MODEL_NAME names; without the variable, ``alone``. Raise RunError if there is none.
    """
    if re.fullmatch(DATA_NAME, name) is None:
        raise RunError(
            f"{name!r} is not the name of a model",
            hint="Write the NAME of --model NAME=PATH: letters, digits and underscores.",
        )
    variable = DataSet(name, is_model=True).variable
    given = os.environ.get(variable) or (os.fspath(alone) if alone is not None else "")
    if os.environ.get("BARNRAISE_LAUNCHED"):
        return _launched(name, variable)
    if not given:
        raise RunError(
            f"this process was given no model {name}",
            hint=f"Start it with `barnraise run --model {name}=FOLDER SCRIPT`, or alone with the variable "
            f"{variable}=FOLDER.",
        )
    folder = os.path.expanduser(given)
    if os.path.isdir(folder):
        return os.path.abspath(folder)
    reference = parse_reference(given)
    if reference is None:
        raise RunError(
            f"there is no folder of model {name} at {folder}",
            hint=f"Correct the variable {variable}: a folder, or an id in this machine's Hugging Face cache.",
        )
    cache = cache_directory(os.environ, load_settings().runs.huggingface_cache)
    return str(find_snapshot(cache, reference)[1])


def _launched(name: str, variable: str) -> str:
    """Return the model's folder in a run; ``alone`` of `model_path` must not hide a missing option."""
    path = os.environ.get(variable)
    if path:
        return path
    prefix = DataSet("x", is_model=True).variable[:-1]
    known = [key.removeprefix(prefix).lower() for key in os.environ if key.startswith(prefix)]
    there = f"it has {', '.join(sorted(known))}" if known else "it has none"
    raise RunError(
        f"this run was started without a model {name}; {there}",
        hint=f"Start it with `barnraise run --model {name}=FOLDER SCRIPT`.",
    )
