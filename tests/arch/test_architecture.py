"""The map in docs/architecture.md names only what exists."""

from __future__ import annotations

import re

from tests.arch.source_tree import ROOT, SOURCE

_PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_architecture_page_names_existing_modules_only() -> None:
    names = set(re.findall(r"(?<![\w/])((?:[a-z_]+/)+[a-z_0-9]+\.py)", _PAGE))
    assert len(names) > 40
    assert sorted(name for name in names if not (SOURCE / "barnraise" / name).exists()) == []


def test_architecture_page_names_existing_packages_only() -> None:
    names = set(re.findall(r'[`"\[]((?:[a-z_]+)(?:/[a-z_]+)*)[`"\]:]', _PAGE))
    packages = {name for name in names if (SOURCE / "barnraise" / name.split("/")[0]).is_dir()}
    assert len(packages) > 25
    assert sorted(name for name in packages if not (SOURCE / "barnraise" / name).is_dir()) == []


def test_architecture_page_draws_every_top_level_package() -> None:
    packages = {path.parent.name for path in (SOURCE / "barnraise").glob("*/__init__.py")}
    assert sorted(name for name in packages if not re.search(rf"\b{name}\b", _PAGE)) == []
