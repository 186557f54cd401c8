"""Make the pictures of docs/pictures from a real run in which a worker dies and comes back.

    python -m benchmarks.pictures [--into FOLDER] [--steps COUNT]

Three real agents on this computer train. It needs tmux, Chromium and the packages of the extra ``dev``. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.agents.machines import REPOSITORY
from benchmarks.page.browser import BrowserPage, browser
from benchmarks.pictures.notebook import convert_notebook
from benchmarks.pictures.scene import Scene, run_with_death
from benchmarks.pictures.terminal import TerminalScreen

_NAMES = ("desk", "laptop", "nas")
_PAUSE_S = 0.25
_WIDE, _PHONE = 1100, 380


def main(arguments: list[str]) -> int:
    """Write all pictures of one run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--into", type=Path, default=REPOSITORY / "docs" / "pictures")
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args(arguments)
    options.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as draft:
        folder = Path(draft)
        kill_at = options.steps // 3
        with run_with_death(folder, _NAMES, steps=options.steps, pause_s=_PAUSE_S, kill_at=kill_at) as scene:
            scene.wait_for_steps(options.steps // 2)
            _draw_terminals(scene, options.into)
            asyncio.run(_draw_page(scene, options.into))
            scene.finish()
            scene.type("report", scene.run, "--into", "report.html")
            convert_notebook(scene.run, _environment(scene), folder / "notebook.html")
            asyncio.run(_draw_files(folder, options.into))
            view = scene.view()
    sizes = {path.name: path.stat().st_size for path in sorted(options.into.glob("*.*g"))}
    deaths = sum(event.kind == "died" for event in view.events)
    print(json.dumps({"steps": view.step, "missing": view.missing, "deaths": deaths, "bytes": sizes}))
    return 0


def _environment(scene: Scene) -> dict[str, str]:
    """Return the variables that make a program use the first agent."""
    names = ("PYTHONPATH", "BARNRAISE_")
    return {name: value for name, value in scene.agents.environment(0).items() if name.startswith(names)}


def _draw_terminals(scene: Scene, into: Path) -> None:
    command = [sys.executable, "-m", "barnraise.cli.main", "watch", scene.run]
    for columns, rows in ((80, 24), (200, 50)):
        screen = TerminalScreen(command, _environment(scene), columns=columns, rows=rows)
        try:
            screen.until(lambda text: "desk" in text and "loss" in text)
            screen.draw(into / f"watch-{columns}.svg", f"barnraise watch {scene.run}")
        finally:
            screen.close()


async def _draw_page(scene: Scene, into: Path) -> None:
    link = json.loads(scene.type("open", "--print", "--json"))["link"]
    async with browser() as tab:
        await tab.visit(link)
        await tab.until("document.querySelector('a[href*=\"run\"]')")
        await tab.until(f"[...document.links].some(link => link.href.includes('{scene.run}'))")
        address = await tab.evaluate(
            f"[...document.links].find(link => link.href.includes('{scene.run}')).href"
        )
        await tab.visit(address)
        await tab.until("document.querySelector('canvas')")
        await asyncio.sleep(1.0)
        await _shoot(tab, into / "page-light.png", _WIDE)
        await _shoot(tab, into / "page-dark.png", _WIDE, is_dark=True)
        await _shoot(tab, into / "page-phone.png", _PHONE)


async def _draw_files(folder: Path, into: Path) -> None:
    async with browser() as tab:
        await tab.visit((folder / "notebook.html").as_uri())
        await _shoot(tab, into / "notebook.png", _WIDE)
        await tab.visit((folder / "report.html").as_uri())
        await _shoot(tab, into / "report-light.png", 820)
        await _shoot(tab, into / "report-dark.png", 820, is_dark=True)
        await _shoot(tab, into / "report-phone.png", _PHONE)


async def _shoot(tab: BrowserPage, path: Path, width: int, *, is_dark: bool = False) -> None:
    await tab.resize(width, 900, is_dark=is_dark)
    await asyncio.sleep(0.5)
    await tab.screenshot(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
