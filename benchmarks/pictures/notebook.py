"""Saved notebook with the live display of a run, executed by a real kernel and converted to HTML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter


def convert_notebook(run: str, environment: Mapping[str, str], page: Path) -> None:
    """Execute a notebook that watches an ended run, and write what is saved as an HTML page."""
    cells: Any = nbformat.v4
    code = f'import barnraise\n\nshown = barnraise.watch("{run}")\nended = shown.wait()'
    title = cells.new_markdown_cell("# A run, seen from a notebook")
    notebook = cells.new_notebook(cells=[title, cells.new_code_cell(code)])
    with patch.dict(os.environ, environment):
        NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    exporter: Any = HTMLExporter
    html, _ = exporter().from_notebook_node(notebook)
    page.write_text(html, encoding="utf-8")
