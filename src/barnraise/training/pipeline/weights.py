"""Weights of a stage: read from the files of the model, or initialized, tensor by tensor.

Only the tensors of the stage are read, so no machine ever holds the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import nn

from barnraise.core.errors import RunError
from barnraise.training.data.loader import preserved_rng, seed_all
from barnraise.training.pipeline.empty_weights import empty_like

log = logging.getLogger("barnraise.training")

_WRAPPERS = ("base_model.model.", "_orig_mod.")
_LAYERS = (".base_layer", ".modules_to_save.default", ".original_module")
_PATTERN = 1 << 20  # random values that are repeated


class WeightFiles:
    """Tensors by name in the safetensors files of a folder. Only the headers are read at first."""

    def __init__(self, folder: Path) -> None:
        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as opened:
                self._files.update(dict.fromkeys(opened.keys(), path))
        if not self._files:
            raise RunError(
                f"there are no weights in {folder}",
                hint="Give the folder of a model with .safetensors files.",
            )

    def find(self, name: str, prefix: str = "") -> str | None:
        """Return the name in the files of a parameter of the model; None if they do not have it.

        ``prefix``: of the model without its head, which files may lack or have in addition.
        """
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        for layer in _LAYERS:
            name = name.replace(layer, "")
        candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        return next((candidate for candidate in candidates if candidate in self._files), None)

    def copy_into(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of these files; ``tensors``: where to, by the name in the files."""
        by_file: dict[Path, list[str]] = {}
        for name in tensors:
            by_file.setdefault(self._files[name], []).append(name)
        for path, names in by_file.items():
            with safe_open(path, framework="pt") as opened:
                for name in names:
                    read = opened.get_tensor(name)
                    if read.shape != tensors[name].shape:
                        raise RunError(
                            f"{name} in {path} has the shape {tuple(read.shape)}, and in the model "
                            f"{tuple(tensors[name].shape)}",
                            hint="Build the model from the config of the same folder.",
                        )
                    tensors[name].copy_(read)


class StageWeights:
    """Loads and drops parameters of one model, in place. ``files``: None if all weights are initialized."""

    def __init__(self, model: nn.Module, files: WeightFiles | None, seed: int, device: torch.device) -> None:
        self._model, self._files, self._seed, self._device = model, files, seed, device
        named = (part for part in model.modules() if hasattr(part, "base_model_prefix"))
        self._prefix = next((str(part.base_model_prefix) for part in named), "")
        # A tied parameter has several places.
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(names[id(parameter)], []).append((module, leaf))

    def load(self, names: Iterable[str]) -> None:
        """Give memory to these parameters, and fill them."""
        wanted = [name for name in sorted(names) if self._parameter(name).is_meta]
        stored = {name: self._files.find(name, self._prefix) for name in wanted} if self._files else {}
        missing = [name for name in wanted if stored.get(name) is None]
        frozen = [name for name in missing if not self._parameter(name).requires_grad]
        if self._files is not None and frozen:
            raise RunError(
                f"the model's files lack {frozen[0]}, which is not trained either",
                hint="Build the model from the config of the same folder, with the same class.",
            )
        for name in wanted:
            self._set(name, torch.empty_like(self._parameter(name), device="cpu"))
        self._initialize(missing)
        named = {stored_name: name for name, stored_name in stored.items() if stored_name is not None}
        if self._files is not None:
            for stored_name, name in named.items():  # one at a time, so that only one is there twice
                self._files.copy_into({stored_name: self._parameter(name).detach()})
                self._move(name)
        for name in missing:
            self._move(name)

    def load_random(self, names: Iterable[str]) -> None:
        """Give memory and small random values to these parameters, without reading a file."""
        pattern = torch.randn(_PATTERN) * 0.02
        for name in names:
            value = torch.zeros_like(self._parameter(name), device=self._device)
            if value.is_floating_point():
                flat = value.view(-1)
                for start in range(0, len(flat), _PATTERN):
                    part = flat[start : start + _PATTERN]
                    part.copy_(pattern[: len(part)])
            self._set(name, value)

    def drop(self, names: Iterable[str]) -> None:
        """Free the memory of these parameters."""
        for name in names:
            empty = empty_like(self._parameter(name))
            for module, leaf in self._places[name]:
                module._parameters[leaf] = empty

    def drop_all_but(self, names: Collection[str]) -> None:
        """Free the memory of all other parameters."""
        self.drop(name for name in self._places if name not in names and not self._parameter(name).is_meta)

    def copies(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """Return new parameters with the values that these have at the start, outside of the model."""
        wanted = sorted(names)
        absent = [name for name in wanted if self._parameter(name).is_meta]
        self.load(absent)
        copies = {name: nn.Parameter(self._parameter(name).detach().clone()) for name in wanted}
        self.drop(absent)
        return copies

    def _initialize(self, names: Iterable[str]) -> None:
        """Initialize parameters as their modules do, with random numbers that depend on the name alone."""
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(self._initializer(name), []).append(name)
        with preserved_rng(), torch.no_grad():
            for path, members in sorted(groups.items()):
                key = blake3(f"{self._seed} {path}".encode()).digest(8)
                seed_all(int.from_bytes(key, "little") >> 1)
                self._reset(path, members)

    def _initializer(self, name: str) -> str:
        """Return the name of the module that initializes a parameter: of LoRA the whole layer."""
        parts = name.split(".")[:-1]
        for length in range(len(parts), 0, -1):
            layer: Any = self._model.get_submodule(".".join(parts[:length]))
            # With init_lora_weights=False, peft leaves the layers inside as torch initializes them.
            if hasattr(layer, "reset_lora_parameters") and any(map(self._lora_kind, layer.active_adapters)):
                return ".".join(parts[:length])
        return ".".join(parts)

    def _lora_kind(self, adapter: str) -> bool | str:
        configs: Any = getattr(self._model, "peft_config", {})
        kind: bool | str = configs[adapter].init_lora_weights
        if kind not in (True, False, "gaussian"):
            raise RunError(
                f"init_lora_weights={kind!r} needs the whole base", hint="Take True or 'gaussian'."
            )
        return kind

    def _reset(self, path: str, names: list[str]) -> None:
        module: Any = self._model.get_submodule(path)
        if hasattr(module, "reset_lora_parameters"):
            for adapter in module.active_adapters:
                module.reset_lora_parameters(adapter, self._lora_kind(adapter))
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
        else:
            raise RunError(
                f"{names[0]} is in no file, and its module has no reset_parameters",
                hint="Give the weights of the whole model.",
            )

    def _parameter(self, name: str) -> nn.Parameter:
        module, leaf = self._places[name][0]
        parameter = module._parameters[leaf]
        assert parameter is not None
        return parameter

    def _move(self, name: str) -> None:
        if self._device.type != "cpu":
            self._set(name, self._parameter(name).detach().to(self._device))

    def _set(self, name: str, value: torch.Tensor) -> None:
        old = self._parameter(name)
        new = nn.Parameter(value.detach(), requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        for module, leaf in self._places[name]:
            module._parameters[leaf] = new
