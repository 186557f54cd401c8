"""Paths of the repository, however deep a test lies."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
VECTORS = ROOT / "tests" / "vectors"
