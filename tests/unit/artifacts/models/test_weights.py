"""Names of pickles, and shards that an index names."""

from __future__ import annotations

import pytest

from barnraise.artifacts.models.weights import has_safetensors, missing_shards, pickled_weights


def test_pickled_weights_are_found_by_name_in_any_case() -> None:
    safe = ["config.json", "model.safetensors", "tokenizer.model", "a.bin/readme.md", "pt"]
    pickled = ["pytorch_model.bin", "x/Model.PTH", "last.ckpt", "a.pt", "state.pkl", "b.pickle"]
    assert pickled_weights([*safe, *pickled]) == pickled
    assert has_safetensors(safe)
    assert not has_safetensors(pickled)


@pytest.mark.parametrize(
    ("index", "content", "missing"),
    [
        ("model.safetensors.index.json", b'{"weight_map": {"a": "1.safetensors", "b": "2"}}', ["2"]),
        ("sub/m.safetensors.index.json", b'{"weight_map": {"a": "3.safetensors"}}', []),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "3.safetensors"}}', ["3.safetensors"]),
        ("model.safetensors.index.json", b"{}", []),
        ("model.safetensors.index.json", b"\xff not json", []),
        ("model.safetensors.index.json", b'{"weight_map": 3}', []),
        ("model.safetensors.index.json", b"[" * 100_000, []),
    ],
)
def test_missing_shards_are_those_beside_the_index(index: str, content: bytes, missing: list[str]) -> None:
    assert missing_shards([index, "1.safetensors", "sub/3.safetensors"], index, content) == missing
