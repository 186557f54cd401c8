"""Each setting has an effect: some module reads it."""

from __future__ import annotations

import ast

import pytest

from barnraise.core.config import Settings, setting_names
from tests.arch.source_tree import files

_KINDS = {type(getattr(Settings(), section)).__name__: section for section in Settings.__struct_fields__}
_CHECKS = ("_check_together", "_check_tree")  # compare settings with each other, which is no effect


def _readings(text: str) -> set[str]:
    """Find the settings that a module reads: as `network.port`, or as `x.port` where x is a Network."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in _CHECKS:
            node.body = []
    sections = {section: section for section in _KINDS.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name):
            sections |= {node.arg: _KINDS[node.annotation.id]} if node.annotation.id in _KINDS else {}
    for node in ast.walk(tree):  # `self._settings = settings`, of an argument that is a section
        if isinstance(node, ast.Assign) and _last_name(node.value) in sections:
            section = sections[_last_name(node.value)]
            sections |= {_last_name(target): section for target in node.targets if _last_name(target)}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    pairs = ((sections.get(_last_name(node.value)), node.attr) for node in attributes)
    return {f"{section}.{key}" for section, key in pairs if section}


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_settings_are_each_read_by_a_module() -> None:
    read = {name for file in files() for name in _readings(file.read_text(encoding="utf-8"))}
    # The unit tests of `call_settings` say that each setting inside such a section has an effect.
    names = {name if name.count(".") == 1 else name.rpartition(".")[0] for name in setting_names()}
    assert sorted(names - read) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port = settings.network.port", {"network.port"}),
        ("def f(wishes: NetworkSettings):\n    return wishes.port", {"network.port"}),
        ("def f(network):\n    self._network = network\n    self._network.port", {"network.port"}),
        ("def _check_together(settings):\n    settings.network.port", set()),
        ("NetworkSettings(port=1)\nother.port", set()),
    ],
)
def test_readings_of_a_module_are_told_from_other_uses_of_a_name(text: str, expected: set[str]) -> None:
    assert _readings(text) & set(setting_names()) == expected
