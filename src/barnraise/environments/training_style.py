"""Detection of the way in which a script trains on several machines, from its text alone. Pure.

- *session*: it calls ``barnraise.init``, or uses ``barnraise.integrations``. All machines train one model.
- *distributed*: it uses ``torch.distributed``, or a library that does. All machines train one model.
- *sweep*: it calls ``barnraise.optuna.storage``. Each worker tries values of its own.
- *separate*: it imports torch and uses neither. Each worker would train a whole model by itself.
- *unknown*: it does not import torch, or its text could not be read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from barnraise.environments.script_imports import reached_modules

# Libraries that start a process group by themselves when torchrun's variables are set.
_LIBRARY_NAMES = """
accelerate axolotl colossalai composer deepspeed fairscale fastai horovod ignite lightning lightning_fabric
llamafactory megatron nemo pytorch_lightning ray sentence_transformers torchft torchtitan torchtune
transformers trl ultralytics unsloth
"""
DISTRIBUTED_LIBRARIES = frozenset(_LIBRARY_NAMES.split())
_DISTRIBUTED = """
init_process_group init_device_mesh DistributedDataParallel FullyShardedDataParallel fully_shard
DistributedSampler
"""
_DISTRIBUTED_NAMES = frozenset(_DISTRIBUTED.split())

# Classes with a replacement that trains in a session, by their package.
_REPLACED = {"transformers": ("Trainer",), "trl": ("SFTTrainer",)}

Kind = Literal["session", "distributed", "sweep", "separate", "unknown"]


class TrainingStyle(NamedTuple):
    """Way in which a script trains on several machines, and the reason for that answer."""

    kind: Kind
    reason: str


def training_style(files: Mapping[str, bytes], script: str) -> TrainingStyle:
    """Return how a script trains; ``files``: the Python files of its folder by their relative paths."""
    modules = reached_modules(files, script)
    if not modules:
        return TrainingStyle("unknown", f"{script} could not be read")
    imported: set[str] = set()
    is_sweep = False
    for path, tree in modules.items():
        names = set(_imported(tree))
        imported |= {name.partition(".")[0] for name in names}
        if "barnraise" in {name.partition(".")[0] for name in names} and _calls(tree, {"init", "launch"}):
            return TrainingStyle("session", f"{path} calls barnraise")
        if any(name.startswith("barnraise.integrations.") for name in names):
            return TrainingStyle("session", f"{path} trains in a session")
        is_sweep |= _opens_study(tree, names)
        if _uses_distributed(tree, names):
            return TrainingStyle("distributed", f"{path} uses torch.distributed")
    libraries = sorted(imported & DISTRIBUTED_LIBRARIES)
    if libraries:
        return TrainingStyle("distributed", f"{libraries[0]} uses torch.distributed")
    if is_sweep:
        return TrainingStyle("sweep", f"{script} calls barnraise.optuna.storage")
    if "torch" not in imported:
        return TrainingStyle("unknown", f"{script} does not import torch")
    return TrainingStyle("separate", f"{script} uses neither barnraise nor torch.distributed")


def replaceable_trainer(files: Mapping[str, bytes], script: str) -> tuple[str, str] | None:
    """Return the file and the name of a Trainer that `barnraise.integrations.transformers` replaces.

    None if the script imports none.
    """
    for path, tree in reached_modules(files, script).items():
        names = set(_imported(tree))
        for package, classes in _REPLACED.items():
            for name in classes:
                if f"{package}.{name}" in names:
                    return path, name
    return None


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _uses_distributed(tree: ast.Module, imported: set[str]) -> bool:
    if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in imported):
        return True
    if any(name.rpartition(".")[2] in _DISTRIBUTED_NAMES for name in imported):
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_package = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if node.attr in _DISTRIBUTED_NAMES or (node.attr == "distributed" and is_package):
                return True
    return False


def _opens_study(tree: ast.Module, imported: set[str]) -> bool:
    """Return True if ``storage`` of `barnraise.optuna` is called."""
    return not imported.isdisjoint({"barnraise", "barnraise.optuna"}) and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "storage"
        and getattr(node.func.value, "attr", getattr(node.func.value, "id", "")) == "optuna"
        for node in ast.walk(tree)
    )


def _calls(tree: ast.Module, names: set[str]) -> bool:
    """Return True if one of these functions is called, with or without a module before its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            called = getattr(function, "attr", None) or getattr(function, "id", None)
            if called in names:
                return True
    return False
