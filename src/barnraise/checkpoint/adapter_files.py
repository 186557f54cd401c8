"""Files of a PEFT adapter: ``adapter_model.safetensors`` and ``adapter_config.json``.

A checkpoint of a PEFT model contains an `AdapterDescription`. So its adapter can be exported without the base
model, and without peft.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from barnraise.checkpoint.files import write_model
from barnraise.checkpoint.tensor_hash import UNCOMPARED, hash_tensor
from barnraise.core.decoding import decode
from barnraise.core.errors import RunError
from barnraise.core.files import write_atomically

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Files of a base model's folder that belong to its tokenizer.
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*")


class AdapterDescription(NamedTuple):
    """``config``: the text of the config file. ``names``: by name in the model's state, that in the file."""

    config: str
    names: Mapping[str, str]


class _AdapterConfig(msgspec.Struct, frozen=True):
    base_model_name_or_path: str | None = None


def read_description(state: Mapping[str, Any]) -> AdapterDescription:
    """Return the description in a checkpoint's state. Raise RunError if there is none."""
    match state.get("adapter"):
        case {"config": str(config), "names": dict(names)} if names:
            return AdapterDescription(config, {str(name): str(own) for name, own in names.items()})
        case _:
            raise RunError(
                "the checkpoint is of a model without a PEFT adapter",
                hint="Export the whole model: without --adapter and --merged.",
            )


def write_adapter(
    folder: Path, description: AdapterDescription, model: Mapping[str, Any], info: Mapping[str, str]
) -> None:
    """Write the folder; each file appears when it is complete."""
    missing = [name for name in description.names if name not in model]
    if missing:
        raise RunError(f"the state has no {missing[0]}, which the adapter needs", hint="Report this.")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {own: model[name] for name, own in description.names.items()}
    write_model(tensors, folder / TENSORS, {"format": "pt", **info})
    write_atomically(folder / CONFIG, description.config.encode(), shared=True)


def write_merged(
    folder: Path,
    description: AdapterDescription,
    model: Mapping[str, torch.Tensor],
    base: Path | None,
    info: Mapping[str, str],
    hashes: Mapping[str, str],
) -> None:
    """Merge the adapter into its base model, and write the whole model and the tokenizer's files.

    ``base``: the folder of the base model; None: the one that the adapter's config names. ``model``: what was
    trained, which may be more than the adapter. ``hashes``: of the base that was trained with. Raise RunError
    if the base is another one, or if its class has no place for what was trained.
    """
    source, kind, _ = open_base(description, base)
    import peft

    whole = kind.from_pretrained(source, local_files_only=True, dtype="auto")
    with tempfile.TemporaryDirectory(prefix="barnraise-adapter-") as draft:
        write_adapter(Path(draft), description, model, info)
        whole = peft.PeftModel.from_pretrained(whole, draft)
    tensors = whole.state_dict()
    _check_base(tensors, hashes, source)
    # peft ignores what the model has no place for, such as a head that the base's class lacks.
    loaded = peft.get_peft_model_state_dict(whole, save_embedding_layers=False)
    beside = model.keys() - description.names.keys() - tensors.keys()
    if lost := sorted(beside | set(description.names.values()) - loaded.keys()):
        raise RunError(
            f"{lost[0]} was trained, but {kind.__name__}, the class in {source / 'config.json'}, has no such "
            "tensor",
            hint="Export with --adapter, and merge it with peft into a model of the class that was trained.",
        )
    more = {name: model[name] for name in model.keys() & tensors.keys() - description.names.keys()}
    whole.load_state_dict(more, strict=False)
    whole.merge_and_unload().save_pretrained(folder)
    copy_tokenizer(source, folder)


def open_base(description: AdapterDescription, base: Path | None) -> tuple[Path, Any, Any]:
    """Return the folder of the base model, its class and its config. Raise RunError if one is not here.

    ``base``: the folder; None: the one that the adapter's config names.
    """
    config_file = decode(_configs, description.config.encode(), "the adapter's config cannot be read")
    source = base or Path(config_file.base_model_name_or_path or "")
    if not (source / "config.json").is_file():
        raise RunError(
            f"the base model is not here: there is no {source / 'config.json'}",
            hint="Name its folder or its id: barnraise export RUN FOLDER --merged --base PATH|ID",
        )
    try:
        import peft  # noqa: F401  # the merge needs it
        import transformers
    except ModuleNotFoundError as error:
        raise RunError(f"{error.name} is not installed here", hint="pip install peft transformers") from error
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        raise RunError(
            f"{source / 'config.json'} names no architecture of Transformers",
            hint="Export with --adapter, and merge it with peft where the model's class is.",
        )
    return source, kind, config


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a base model's tokenizer."""
    for pattern in _TOKENIZER:
        for file in source.glob(pattern):
            if file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())


def _check_base(tensors: Mapping[str, torch.Tensor], hashes: Mapping[str, str], source: Path) -> None:
    """Raise RunError if the base in a folder is not the one of these hashes."""
    for name, expected in hashes.items():
        tensor = tensors.get(name)
        if tensor is None or expected == UNCOMPARED:
            continue
        # The training may have loaded it with another dtype than that of the files.
        dtypes = (tensor.dtype, *(_DTYPES if tensor.is_floating_point() else ()))
        if all(hash_tensor(tensor.to(dtype)) != expected for dtype in dtypes):
            raise RunError(
                f"{source} is not the base that the adapter was trained with: {name} differs",
                hint="Name the right folder with --base. If the training quantized its base, export with "
                "--adapter, and merge it with peft.",
            )


_configs = msgspec.json.Decoder(_AdapterConfig)
