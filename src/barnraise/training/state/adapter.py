"""Adapters of PEFT: what a folder that ``PeftModel.from_pretrained`` loads needs beside tensors.

A PEFT model is recognised by its ``peft_config``. Then the peft package is already loaded, and only then is
it used.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from barnraise.checkpoint.adapter_files import CONFIG, AdapterDescription, write_adapter
from barnraise.core.errors import RunError
from barnraise.training.state.model_tensors import state_of, tensors_of


def describe_adapter(model: torch.nn.Module) -> AdapterDescription | None:
    """Return the description of a PEFT model's active adapter; None for another model.

    Return None also for an adapter whose file has tensors that are no parameters of the model.
    """
    model = getattr(model, "_orig_mod", model)
    configs, name = getattr(model, "peft_config", None), getattr(model, "active_adapter", None)
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(configs, dict) or not isinstance(name, str) or name not in configs:
        return None
    config = copy.deepcopy(configs[name])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        base = getattr(getattr(model, "base_model", None), "model", None)
        config.base_model_name_or_path = getattr(base, "name_or_path", "") or None
    with tempfile.TemporaryDirectory(prefix="barnraise-adapter-") as folder:
        config.save_pretrained(folder)
        text = (Path(folder) / CONFIG).read_text(encoding="utf-8")
    state = tensors_of(model)
    known = {id(tensor): own for own, tensor in state.items()}
    # False: "auto" would ask the Hugging Face Hub for the base model's config.
    saved = peft.get_peft_model_state_dict(model, dict(state), adapter_name=name, save_embedding_layers=False)
    # peft gives the same tensors other names. Their addresses do not tell: without memory all have one.
    names = {known.get(id(tensor), ""): own for own, tensor in saved.items()}
    return None if "" in names or len(names) != len(saved) else AdapterDescription(text, names)


def ids_of_adapter(model: torch.nn.Module, description: AdapterDescription | None) -> set[int]:
    """Return the ids of the tensors in the adapter's file.

    They are state even if nothing trains them, so a checkpoint has a whole adapter.
    """
    if description is None:
        return set()
    tensors = tensors_of(model, keep_vars=True)
    return {id(tensors[name]) for name in description.names}


def save_adapter(model: torch.nn.Module, folder: Path, steps: int) -> None:
    """Write a PEFT model's adapter as a folder."""
    description = describe_adapter(model)
    if description is not None:
        write_adapter(folder, description, state_of(model), {"steps": str(steps)})
        return
    save = getattr(model, "save_pretrained", None)
    if save is None:
        raise RunError(
            f"{folder} cannot be written: the model has no adapter", hint="Name a .safetensors file."
        )
    save(str(folder))


def is_adapter_folder(model: torch.nn.Module, path: Path) -> bool:
    """Tell whether ``run.save`` of this model to this path writes an adapter folder."""
    is_peft = isinstance(getattr(getattr(model, "_orig_mod", model), "peft_config", None), dict)
    return is_peft and path.suffix != ".safetensors"
