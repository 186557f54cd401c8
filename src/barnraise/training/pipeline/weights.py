"""Weights of a stage: read from the files of the model, or initialized, tensor by tensor.

Only the tensors of the stage are read, so no machine ever holds the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import nn

from barnraise.checkpoint.serialization import tensor_bytes
from barnraise.core.errors import RunError
from barnraise.training.data.loader import preserved_rng, seed_all
from barnraise.training.pipeline.base.file_names import FileNames, StoredSource
from barnraise.training.pipeline.base.narrow_layers import narrowed, weight_of_scale
from barnraise.training.pipeline.empty_weights import empty_like

log = logging.getLogger("barnraise.training")

_PATTERN = 1 << 20  # random values that are repeated
_SAMPLED, _ROWS = 16, 16  # tensors of which a sample is read, and the first rows of each


class WeightFiles:
    """Tensors by name in the safetensors files of a folder. Only the headers are read at first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as opened:
                    self._files.update(dict.fromkeys(opened.keys(), path))
            except SafetensorError as error:
                raise RunError(f"{path} cannot be read: {error}", hint="Download this file again.") from error
        if not self._files:
            raise RunError(
                f"there are no weights in {folder}",
                hint="Name a folder with .safetensors files, such as barnraise.model_path(NAME).",
            )

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, read from its file."""
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    def sample(self) -> str:
        """Return a hash of the beginning of some tensors, which tells trained models of one form apart."""
        names = sorted(self._files)
        hasher = blake3()
        for name in names[:: -(-len(names) // _SAMPLED)]:
            with safe_open(self._files[name], framework="pt") as opened:
                part = opened.get_slice(name)
                shape = part.get_shape()
                if not shape:
                    value = opened.get_tensor(name)
                elif len(shape) < 3:
                    value = part[:_ROWS]
                else:  # of a mixture, each of whose experts is large
                    value = part[:1, :_ROWS]
            hasher.update(repr((name, shape)).encode())
            hasher.update(tensor_bytes(value.contiguous()))
        return hasher.digest(8).hex()


class StageWeights:
    """Loads and drops parameters of one model, in place. ``files``: None if all weights are initialized."""

    def __init__(self, model: nn.Module, files: WeightFiles | None, seed: int, device: torch.device) -> None:
        self._model, self._files, self._seed, self._device = model, files, seed, device
        # A tied parameter has several places, and the name of a stored tensor for each.
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._aliases: dict[str, list[str]] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for path, module in model.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    name = names[id(parameter)]
                    self._places.setdefault(name, []).append((module, leaf))
                    stored = weight_of_scale(module, leaf)
                    self._aliases.setdefault(name, []).append(f"{path}.{stored}" if path else stored)
        self._sources = FileNames(model, files.names) if files is not None else None

    def load(self, names: Iterable[str]) -> None:
        """Give memory to these parameters, and fill them."""
        wanted = [name for name in sorted(names) if self._parameter(name).is_meta]
        sources = (
            {name: self._sources.find(self._aliases[name]) for name in wanted}
            if self._sources is not None
            else {}
        )
        missing = [name for name in wanted if sources.get(name) is None]
        frozen = [name for name in missing if not self._parameter(name).requires_grad]
        if self._files is not None and frozen:
            raise RunError(
                f"the model's files lack {frozen[0]}, which is not trained either",
                hint="Build the model from the config of the same folder, with the class of its files.",
            )
        for name in wanted:
            self._set(name, torch.empty_like(self._parameter(name), device="cpu"))
        self._initialize(missing)
        by_source: dict[StoredSource, list[str]] = {}
        for name, source in sources.items():
            if source is not None:
                by_source.setdefault(source, []).append(name)
        for source, targets in by_source.items():  # one at a time, so that only one is there twice
            for name, value in self._read(source, targets).items():
                module, leaf = self._places[name][0]
                self._fill(name, self._parameter(name).detach(), narrowed(module, leaf, value))
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

    def load_buffers(self) -> None:
        """Read the buffers that the files have, such as constants of a trained model."""
        for path, module in self._model.named_modules():
            for leaf, buffer in module._buffers.items():
                name = f"{path}.{leaf}" if path else leaf
                source = self._sources.find([name]) if self._sources is not None else None
                if source is None or buffer is None or leaf in module._non_persistent_buffers_set:
                    continue
                self._fill(name, buffer, self._read(source, [name])[name])

    def _read(self, source: StoredSource, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return what a source holds for these tensors. Raise RunError if the files are narrow themselves."""
        assert self._files is not None
        assert self._sources is not None
        values = source.load(self._files.read)
        read = {}
        for name in names:
            aliases = map(self._sources.plain_name, self._aliases.get(name, [name]))
            read[name] = next(values[alias] for alias in aliases if alias in values)
            if read[name].dtype.itemsize == 1 and read[name].dtype != torch.bool:
                raise RunError(
                    f"{name} has one byte for each number in {self._files.folder}",
                    hint="Take the files of the model before it was quantized, and base='int8' or 'nf4'.",
                )
        return read

    def _fill(self, name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a value of the files into a tensor of the model."""
        if value.shape != tensor.shape:
            assert self._files is not None
            raise RunError(
                f"{name} has the shape {tuple(value.shape)} in {self._files.folder}, and in the model "
                f"{tuple(tensor.shape)}",
                hint="Build the model from the config of the same folder.",
            )
        tensor.copy_(value)

    def drop(self, names: Iterable[str]) -> None:
        """Free the memory of these parameters."""
        for name in names:
            empty = empty_like(self._parameter(name))
            for module, leaf in self._places[name]:
                module._parameters[leaf] = empty

    def drop_all_but(self, names: Collection[str]) -> None:
        """Free the memory of all other parameters."""
        self.drop(name for name in self._places if name not in names and not self._parameter(name).is_meta)

    def held_bytes(self) -> int:
        """Return the bytes of the parameters that have memory now."""
        parameters = map(self._parameter, self._places)
        return sum(parameter.nbytes for parameter in parameters if not parameter.is_meta)

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
