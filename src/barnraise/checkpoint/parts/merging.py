"""Merge of an adapter into its base, layer by layer, so that the model may be larger than the memory.

The model is built without memory. peft merges one layer at a time, with its weights from the base's files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from barnraise.checkpoint.adapter_files import CONFIG, AdapterDescription, copy_tokenizer, open_base
from barnraise.checkpoint.parts.trained_tensors import TensorForm, write_tensors

_PREFIX = "base_model.model."  # of a PEFT model's names
_BASE_LAYER = "base_layer."
_COPIED = ("config.json", "generation_config.json")


class _LayerMerge:
    """A model without memory, whose layers are merged one by one.

    ``replaced``: by the name of the base, the trained tensor that takes its place.
    """

    def __init__(self, files: Mapping[str, Path], model: Mapping[str, torch.Tensor]) -> None:
        self._files, self._model = files, model
        self._layers: dict[str, Any] = {}  # by the path in the base
        self._adapters: dict[str, dict[str, str]] = {}  # of each layer: by its own name, that of the training
        self._merged: dict[str, str] = {}  # by the name of the base, the layer that it belongs to
        self.replaced: dict[str, str] = {}

    def find_places(self, kind: Any, config: Any, description: AdapterDescription, adapter: Any) -> bool:
        """Find what becomes of each trained tensor. Return False if one has no place in the base's files."""
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer

        if adapter.is_prompt_learning:
            return False
        with torch.device("meta"):
            whole = peft.PeftModel(kind(config), adapter, low_cpu_mem_usage=True)
        for path, module in whole.named_modules():
            if isinstance(module, BaseTunerLayer):
                own = path.removeprefix(_PREFIX)
                self._layers[own], self._adapters[own] = module, {}
                leaves = module.get_base_layer().state_dict()
                self._merged |= {f"{own}.{leaf}": own for leaf in leaves}
        state = whole.state_dict()
        known = {id(tensor): name for name, tensor in state.items()}
        saved = peft.get_peft_model_state_dict(
            whole, dict(state), adapter_name="default", save_embedding_layers=False
        )
        places = {name: known.get(id(tensor), "") for name, tensor in saved.items()}
        named = {training: places.get(name, "") for training, name in description.names.items()}
        named |= {name: name for name in self._model if name not in description.names}
        placed = [self._place(training, name) for training, name in named.items()]
        if not all(placed):
            return False
        has_all = all(
            {*self._adapters[path], *(f"{_BASE_LAYER}{leaf}" for leaf in layer.get_base_layer().state_dict())}
            == layer.state_dict().keys()
            for path, layer in self._layers.items()
        )
        return has_all and self._merged.keys() | self.replaced.keys() <= self._files.keys()

    def _place(self, training: str, name: str) -> bool:
        """Note where a trained tensor belongs. ``name``: in the model; empty if there is no place."""
        own = name.removeprefix(_PREFIX)
        layer = next((path for path in self._layers if own.startswith(f"{path}.")), None)
        if not name or training not in self._model:
            return False
        if layer is not None:
            self._adapters[layer][own.removeprefix(f"{layer}.")] = training
            return not own.removeprefix(f"{layer}.").startswith(_BASE_LAYER)
        self.replaced[own.replace(".modules_to_save.default.", ".")] = training
        return True

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of the merged model, in the type of the base."""
        base = _read(self._files[name], name)
        if name in self.replaced:
            return self._model[self.replaced[name]].to(base.dtype)
        if name not in self._merged:
            return base
        path = self._merged[name]
        layer = self._layers[path]
        leaf = name.removeprefix(f"{path}.")
        parts = {own: self._model[training] for own, training in self._adapters[path].items()}
        for each in layer.get_base_layer().state_dict():
            parts[f"{_BASE_LAYER}{each}"] = _read(self._files[f"{path}.{each}"], f"{path}.{each}").clone()
        layer.load_state_dict(parts, strict=True, assign=True)
        layer.merge()
        merged: torch.Tensor = layer.get_base_layer().state_dict()[leaf].detach()
        layer.to("meta")
        layer.merged_adapters.clear()
        return merged


def merge_by_layers(
    folder: Path,
    description: AdapterDescription,
    model: Mapping[str, torch.Tensor],
    base: Path | None,
    info: Mapping[str, str],
) -> bool:
    """Write the merged model, never with more than one layer in memory. Parameters as for `write_merged`.

    Return False, and write nothing, if the base's files do not have the names of its class. Then only the
    whole model can be merged.
    """
    source, kind, config = open_base(description, base)
    import peft

    with tempfile.TemporaryDirectory(prefix="barnraise-adapter-") as draft:
        (Path(draft) / CONFIG).write_text(description.config, encoding="utf-8")
        adapter = peft.PeftConfig.from_pretrained(draft)
    files = _names(source)
    merge = _LayerMerge(files, model)
    if not merge.find_places(kind, config, description, adapter):
        return False
    forms = {}
    for name, path in files.items():
        tensor = _read(path, name)
        forms[name] = TensorForm(tensor.dtype, tuple(tensor.shape))
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", forms, merge.read, {"format": "pt", **info})
    for name in _COPIED:
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())
    copy_tokenizer(source, folder)
    return True


def _names(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder that Transformers wrote."""
    names = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            names.update(dict.fromkeys(opened.keys(), path))
    return names


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor
