"""Real Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

_START_S = 60.0
_CALL_S = 60.0
_NAVIGATED = "Inspected target navigated or closed"
_MOST_HEIGHT = 12_000  # pixels of a picture
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
)


def find_chromium() -> str | None:
    """Return the path of Chromium, or None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class NavigatedError(AssertionError):
    """The page changed to another address while a call ran in it."""


class BrowserPage:
    """Tab of a browser. ``requests``: addresses that it asked for; ``problems``: errors of its console."""

    def __init__(self, line: aiohttp.ClientWebSocketResponse) -> None:
        self._line = line
        self._serial = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._loaded = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, /, **parameters: Any) -> dict[str, Any]:
        """Return the result of a call of the protocol."""
        self._serial += 1
        future = self._waiting[self._serial] = asyncio.get_running_loop().create_future()
        await self._line.send_json({"id": self._serial, "method": method, "params": parameters})
        answer = await asyncio.wait_for(future, _CALL_S)
        if answer.get("error", {}).get("message") == _NAVIGATED:
            raise NavigatedError(answer)
        assert "error" not in answer, answer
        return dict(answer.get("result", {}))

    async def visit(self, address: str) -> None:
        """Open an address and wait until it is loaded."""
        self._loaded.clear()
        await self.call("Page.navigate", url=address)
        await asyncio.wait_for(self._loaded.wait(), _CALL_S)

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true, also on another page that is opened meanwhile."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            with contextlib.suppress(NavigatedError):
                if await self.evaluate(f"Boolean({script})"):
                    return
            assert asyncio.get_running_loop().time() < deadline, f"{script} never was true"
            await asyncio.sleep(0.05)

    async def press(self, key: str, code: int) -> None:
        """Send a key press and its release."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more
            )

    async def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Change the size of the tab and its colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG file."""
        await self.until("document.readyState === 'complete'")
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": min(size["height"], _MOST_HEIGHT),
            "scale": 1,
        }
        picture = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    async def _read(self) -> None:
        async for message in self._line:
            answer = message.json()
            if "id" in answer:
                self._waiting.pop(answer["id"]).set_result(answer)
                continue
            parameters = answer.get("params", {})
            match answer["method"]:
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Network.requestWillBeSent":
                    self.requests.append(parameters["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.problems.append(str(parameters["exceptionDetails"]))
                case "Log.entryAdded":
                    self.problems.append(
                        f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}"
                    )

    async def close(self) -> None:
        """Stop reading what the browser sends."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[BrowserPage]:
    """Start Chromium with an empty profile and yield its tab; stop it at the end."""
    program = find_chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _debugging_port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(address, max_msg_size=1 << 28) as line:
                    page = BrowserPage(line)
                    for domain in ("Page", "Network", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
                    await page.close()
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _debugging_port(path: Path) -> int:
    deadline = asyncio.get_running_loop().time() + _START_S
    while not path.exists() or not path.read_text().strip():
        assert asyncio.get_running_loop().time() < deadline, "Chromium did not start"
        await asyncio.sleep(0.05)
    return int(path.read_text().splitlines()[0])
