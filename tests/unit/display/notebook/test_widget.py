"""Script of the widget in a real browser: it shows the picture, and the next one when it changes."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest

pytest.importorskip("anywidget")
from barnraise.display.notebook.picture import draw_picture
from barnraise.display.notebook.widget import PictureWidget
from barnraise.history.view_builder import build_view
from benchmarks.invented_run import example_run
from benchmarks.page.browser import browser, find_chromium
from tests.unit.display.hostile_run import hostile_run

pytestmark = [
    pytest.mark.clocks,
    pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed"),
]
PAGE = """<!doctype html><meta charset="utf-8"><div id="cell"></div><script type="module">
import widget from "data:text/javascript;base64,MODULE";
const handlers = {};
const model = { get: () => window.picture, on: (name, act) => { handlers[name] = act; }, off: () => {} };
window.picture = "";
widget.render({ model, el: document.getElementById("cell") });
window.change = (picture) => { window.picture = picture; handlers["change:picture"](); };
</script>"""


def test_widget_shows_each_picture_and_runs_no_script_of_it(tmp_path: Path) -> None:
    module = base64.b64encode(str(PictureWidget._esm).encode()).decode()
    (tmp_path / "page.html").write_text(PAGE.replace("MODULE", module), encoding="utf-8")
    shown, warnings = asyncio.run(_show(tmp_path / "page.html"))
    assert "2 of 3 machines train" in shown[0]
    assert "finished after 600 steps" in shown[1]
    assert "<script>alert(1)</script>" in shown[2], "an attack is shown as text"
    assert warnings == 0


async def _show(page: Path) -> tuple[list[str], int]:
    pictures = [draw_picture(build_view(run)) for run in (example_run(200), example_run(), hostile_run())]
    shown = []
    async with browser() as tab:
        await tab.visit(page.as_uri())
        await tab.until("window.change")
        await tab.evaluate("window.warnings = 0; window.alert = () => { window.warnings += 1; }")
        for picture in pictures:
            text = base64.b64encode(picture.encode()).decode()
            decoded = f"new TextDecoder().decode(Uint8Array.from(atob('{text}'), sign => sign.charCodeAt(0)))"
            await tab.evaluate(f"window.change({decoded})")
            await asyncio.sleep(0.3)
            shown.append(await tab.evaluate("document.getElementById('cell').shadowRoot.textContent"))
        images = "document.getElementById('cell').shadowRoot.querySelectorAll('img')"
        await tab.until(f"[...{images}].every(image => image.complete && image.naturalWidth > 0)")
        return shown, int(await tab.evaluate("window.warnings"))
