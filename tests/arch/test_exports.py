"""Exports of each package exist, are listed once, and in order."""

from __future__ import annotations

import importlib

import pytest

from tests.arch.source_tree import files, is_torch_free, module_name

PACKAGES = [module_name(file) for file in files() if file.name == "__init__.py"]


@pytest.mark.parametrize("package", [name for name in PACKAGES if is_torch_free(name)])
def test_exported_names_exist(package: str) -> None:
    module = importlib.import_module(package)
    names = list(getattr(module, "__all__", []))
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []
