"""Make the pictures of docs/pictures from a real run in which a worker dies and comes back.

    python -m benchmarks.pictures [--into FOLDER] [--steps COUNT]

Three real agents on this computer train for about four minutes. It needs tmux, Chromium and the packages of
the extra ``dev``. The last line is one JSON object. It fails if the run went in another way than it should,
as on a computer that is too busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from barnraise.history.view import RunView
from benchmarks.agents.machines import REPOSITORY
from benchmarks.page.browser import BrowserPage, browser
from benchmarks.pictures.notebook import convert_notebook
from benchmarks.pictures.scene import Scene, run_with_death
from benchmarks.pictures.terminal import TerminalScreen

_NAMES = ("desk", "laptop", "nas")
_KILL_AT = 0.25  # part of the steps
_LOOK_AT = 0.45
_WIDE, _REPORT, _NOTEBOOK, _PHONE = 1100, 820, 940, 380
_TERMINALS = ((80, 24), (200, 50))
_COLUMN, _GAP = 1500, 24  # of pictures of a phone, in pixels


def main(arguments: list[str]) -> int:
    """Write all pictures of one run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--into", type=Path, default=REPOSITORY / "docs" / "pictures")
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args(arguments)
    options.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as draft:
        folder = Path(draft)
        kill_at = round(_KILL_AT * options.steps)
        with run_with_death(folder, _NAMES, steps=options.steps, kill_at=kill_at) as scene:
            scene.wait_for_steps(round(_LOOK_AT * options.steps))
            for columns, rows in _TERMINALS:
                picture = folder / f"watch-{columns}.svg"
                picture.write_text(_draw_terminal(scene, columns, rows), encoding="utf-8")
            asyncio.run(_shoot_page(scene, options.into))
            scene.wait_for_end()
            scene.type("report", scene.run, "--into", "report.html")
            convert_notebook(scene.run, _environment(scene), folder / "notebook.html")
            asyncio.run(_shoot_files(folder, options.into))
            view = scene.view()
    sizes = {path.name: path.stat().st_size for path in sorted(options.into.glob("*.png"))}
    deaths = _deaths(view)
    print(json.dumps({"steps": view.step, "missing": view.missing, "deaths": deaths, "bytes": sizes}))
    return 0 if deaths == [_NAMES[-1]] and not view.rolled_back else 1


def _deaths(view: RunView) -> list[str]:
    """Return the machine of each death, in the order of time."""
    names = {machine.node: machine.name for machine in view.machines}
    return [names[event.node] for event in view.events if event.kind in ("died", "evicted")]


def _environment(scene: Scene) -> Mapping[str, str]:
    """Return the variables that make a program use the first agent."""
    names = ("PYTHONPATH", "BARNRAISE_")
    return {name: value for name, value in scene.agents.environment(0).items() if name.startswith(names)}


def _draw_terminal(scene: Scene, columns: int, rows: int) -> str:
    command = [sys.executable, "-m", "barnraise.cli.main", "watch", scene.run]
    screen = TerminalScreen(command, _environment(scene), columns=columns, rows=rows)
    try:
        screen.until(lambda text: "desk" in text and "Loss" in text and "Quit" in text)
        return screen.draw(f"barnraise watch {scene.run}")
    finally:
        screen.close()


async def _shoot_page(scene: Scene, into: Path) -> None:
    link = json.loads(scene.type("open", "--print", "--json"))["link"]
    async with browser() as tab:
        await tab.visit(link)
        link_of_run = f"[...document.links].find(link => link.href.includes('{scene.run}'))"
        await tab.until(link_of_run)
        await tab.visit(await tab.evaluate(f"{link_of_run}.href"))
        await tab.until("document.querySelector('canvas')")
        await _shoot(tab, into / "page-light.png", _WIDE)
        await _shoot(tab, into / "page-dark.png", _WIDE, is_dark=True)
        await _shoot(tab, into / "page-phone.png", _PHONE)
    _arrange(into / "page-phone.png")


async def _shoot_files(folder: Path, into: Path) -> None:
    async with browser() as tab:
        for columns, _ in _TERMINALS:
            await tab.visit((folder / f"watch-{columns}.svg").as_uri())
            box = await tab.evaluate("document.documentElement.getAttribute('viewBox')")
            _, _, width, height = (float(number) for number in box.split())
            await _shoot(tab, into / f"watch-{columns}.png", round(width), round(height))
        await tab.visit((folder / "notebook.html").as_uri())
        await _shoot(tab, into / "notebook.png", _NOTEBOOK)
        await tab.visit((folder / "report.html").as_uri())
        await _shoot(tab, into / "report-light.png", _REPORT)
        await _shoot(tab, into / "report-dark.png", _REPORT, is_dark=True)
        await _shoot(tab, into / "report-phone.png", _PHONE)
    _arrange(into / "report-phone.png")


async def _shoot(
    tab: BrowserPage, path: Path, width: int, height: int = 900, *, is_dark: bool = False
) -> None:
    await tab.resize(width, height, is_dark=is_dark)
    await asyncio.sleep(1.0)
    await tab.screenshot(path)
    _shrink(path, Image.open(path))


def _shrink(path: Path, picture: Image.Image) -> None:
    """Write a picture with 256 colours: text and lines need no more."""
    few = picture.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def _arrange(path: Path) -> None:
    """Put the parts of a long picture beside each other."""
    whole = Image.open(path).convert("RGB")
    count = -(-whole.height // _COLUMN)
    wide = Image.new("RGB", (count * (whole.width + _GAP) - _GAP, min(_COLUMN, whole.height)), "#808080")
    for column in range(count):
        part = whole.crop((0, column * _COLUMN, whole.width, min(whole.height, (column + 1) * _COLUMN)))
        wide.paste(part, (column * (whole.width + _GAP), 0))
    _shrink(path, wide)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
