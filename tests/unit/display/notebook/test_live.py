"""Live display in a real Jupyter kernel: it follows a run, and stays in the saved notebook as a picture."""

from __future__ import annotations

import base64
import re
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barnraise.core.errors import RunError
from barnraise.display.notebook.live import watch
from barnraise.history.entries import Entry, LogHead
from barnraise.history.log_file import RunLogWriter, log_path
from benchmarks.invented_run import DESK, RUN, example_run

FIRST_CELL = """
import barnraise, os, pathlib, time
pathlib.Path(os.environ["BARNRAISE_STATE_DIRECTORY"], "go").touch()
shown = None
while shown is None:
    try:
        shown = barnraise.watch("train")
    except barnraise.BarnraiseError:
        time.sleep(0.1)
"""
SECOND_CELL = """
steps = set()
while not shown.wait(0.2):
    steps.add(shown.view.step)
print(len(steps))
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


def _write_in_parts(state: Path, stop: threading.Event) -> None:
    """Append the invented run to a log as a worker does, in some seconds, when the notebook is ready."""
    head, *entries = example_run()
    assert isinstance(head, LogHead)
    shift = time.time() - max(getattr(entry, "at", 0.0) for entry in entries)
    moved: list[Entry] = [
        msgspec.structs.replace(entry, at=entry.at + shift) if getattr(entry, "at", 0) else entry  # type: ignore[union-attr]
        for entry in sorted(entries, key=lambda entry: type(entry).__name__ == "RunEnd")
    ]
    while not (state / "go").exists() and not stop.wait(0.05):
        pass
    writer = RunLogWriter(log_path(state, RUN, DESK), head)
    for part in range(8):
        writer.append(moved[part * len(moved) // 8 : (part + 1) * len(moved) // 8])
        if stop.wait(0.8):
            break
    writer.close()


def _run_notebook(cells: list[str], state: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(state))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return notebook


def test_display_follows_a_run_and_stays_as_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    writer = threading.Thread(target=_write_in_parts, args=(tmp_path, stop))
    writer.start()
    try:
        notebook = _run_notebook([FIRST_CELL, SECOND_CELL], tmp_path, monkeypatch)
    finally:
        stop.set()
        writer.join()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    pictures = [output.data for output in outputs if output.output_type == "display_data"]
    assert len(pictures) == 1, outputs
    assert WIDGET not in pictures[0], "a saved notebook has no kernel"
    assert "finished after 600 steps" in pictures[0]["text/plain"]
    html = pictures[0]["text/html"]
    assert "finished after 600 steps" in html
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert len(images) == 2
    assert "mac died" in base64.b64decode(images[0]).decode()
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert int(printed.split()[-1]) >= 2, "the picture changed while the run went on"


def test_closed_display_keeps_its_last_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, *entries = example_run(200)
    assert isinstance(head, LogHead)
    writer = RunLogWriter(log_path(tmp_path, RUN, DESK), head)
    writer.append(entries)
    writer.close()
    notebook = _run_notebook(
        ["import barnraise\nwith barnraise.watch() as shown:\n    print(shown.view.step)"],
        tmp_path,
        monkeypatch,
    )
    (picture,) = [output.data for output in notebook.cells[0].outputs if output.output_type == "display_data"]
    assert WIDGET not in picture
    assert "nas is paused" in picture["text/html"]
    assert "nothing new for" in picture["text/html"]


def test_watch_outside_of_a_notebook_says_what_to_do() -> None:
    with pytest.raises(RunError, match=r"no notebook|not installed"):
        watch()
