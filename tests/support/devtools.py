"""A real browser for tests: Debian's chromium or Google Chrome without a window, driven over its
DevTools protocol (https://chromedevtools.github.io/devtools-protocol/).

    with browser(folder) as chrome:
        page = chrome.open("http://127.0.0.1:8888/lab")
        page.click("button.start")              # a real mouse at real coordinates
        page.press("ArrowRight")                # a real key
        page.until("document.title", "a title") # polls; a picture and the console if it never comes
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from provoke import stop_tree, until

try:
    import websocket  # from websocket-client, which jupyter_server brings
except ImportError:
    websocket = None

WIDTH, HEIGHT = 1366, 768  # the screen of a small laptop, in CSS pixels
WITHIN_S = 60.0  # how long a page may take for one thing: patient, since machines can be busy
NAMES = (
    "chromium",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27}  # with their Windows codes


def missing() -> str:
    """Why there can be no browser here, or nothing."""
    if websocket is None:
        return "needs the package websocket-client"
    if executable() is None:
        return "needs a browser: apt-get install chromium"
    return ""


def executable() -> str | None:
    """Not one from snap, which has a /tmp of its own and finds no profile there."""
    found = (path for path in map(shutil.which, NAMES) if path and not path.startswith("/snap/"))
    return next(found, None)


class BrowserError(AssertionError):
    """What a page should have done and did not, with what is needed to see why."""


class Browser:
    """A chromium with its profile in `folder`; pictures of failures go to `pictures`."""

    def __init__(self, folder: Path, pictures: Path):
        if reason := missing():
            raise RuntimeError(f"no browser can start: {reason}")
        self.folder, self.pictures = folder, pictures
        self.left: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        program = executable()
        assert program is not None
        with (folder / "browser.log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    "--headless",
                    "--no-sandbox",  # which neither root nor most containers can have
                    "--disable-dev-shm-usage",  # containers have little of it
                    "--disable-gpu",
                    "--no-first-run",
                    "--disable-background-networking",
                    "--disable-component-update",
                    "--disable-extensions",
                    f"--user-data-dir={folder / 'profile'}",
                    "--remote-debugging-port=0",  # it chooses one, and writes it down
                    "about:blank",
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(folder)},
            )
        self.port = self._port()

    def _port(self) -> int:
        written = self.folder / "profile/DevToolsActivePort"

        def port() -> int:
            lines = written.read_text().splitlines() if written.exists() else []
            return int(lines[0]) if len(lines) == 2 else 0

        until(lambda: port() or self.process.poll() is not None, WITHIN_S)
        if number := port():
            return number
        self.stop()
        log = (self.folder / "browser.log").read_text()
        raise BrowserError(f"the browser did not start within {WITHIN_S} s; it said:\n{log}")

    def open(self, url: str) -> "Page":
        """A page of its own for `url`."""
        page = Page(self, self._ask("PUT", "new?about:blank"))
        page.resize(WIDTH, HEIGHT)
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        page.call("Page.navigate", url=url)
        return page

    def close(self, page: "Page") -> None:
        page.socket.close()
        self._ask("GET", f"close/{page.target}")

    def _ask(self, method: str, what: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/json/{what}"
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as got:
            text = got.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def stop(self) -> None:
        """End it; `left` names those of its processes that had to be killed."""
        self.left = stop_tree(self.process)


class Page:
    """One tab; `console` has what it logs and the errors that it does not catch."""

    def __init__(self, chrome: Browser, target: dict[str, str]):
        self.chrome, self.target = chrome, target["id"]
        self.console: list[str] = []
        self._numbers = itertools.count(1)
        self.socket = websocket.create_connection(
            target["webSocketDebuggerUrl"], timeout=WITHIN_S, suppress_origin=True
        )
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; returns its result."""
        try:
            number = self._send(method, params)
            while (message := json.loads(self.socket.recv())).get("id") != number:
                self._hear(message)
        except (websocket.WebSocketException, OSError) as error:
            raise BrowserError(f"{method}: the page does not answer: {error}") from None
        if "error" in message:
            raise BrowserError(f"{method}: {message['error']['message']}")
        return message["result"]

    def _send(self, method: str, params: dict[str, Any]) -> int:
        number = next(self._numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        return number

    def _hear(self, event: dict[str, Any]) -> None:
        kind, params = event.get("method"), event.get("params", {})
        if kind == "Page.javascriptDialogOpening":  # it would block the page
            self._send("Page.handleJavaScriptDialog", {"accept": True})
        elif kind == "Runtime.consoleAPICalled" and params["type"] != "debug":
            words = [str(arg.get("value", arg.get("description", ""))) for arg in params["args"]]
            self.console.append(f"{params['type']}: {' '.join(words)}")
        elif kind == "Runtime.exceptionThrown":
            self.console.append(f"uncaught: {_story(params['exceptionDetails'])}")
        elif kind == "Log.entryAdded":
            entry = params["entry"]
            self.console.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}")

    def value(self, script: str) -> Any:
        """The JSON value of a JavaScript expression; a promise is awaited."""
        got = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in got:
            raise BrowserError(f"{script}: {_story(got['exceptionDetails'])}")
        return got["result"].get("value")

    def until(self, script: str, what: str, within_s: float = WITHIN_S) -> Any:
        """Poll `script` until it is true; returns its value. Pages that still load may throw."""
        end_s = time.monotonic() + within_s
        while True:
            try:
                if last := self.value(script):
                    return last
            except BrowserError as error:
                last = error
            if time.monotonic() > end_s:
                raise self.failure(f"{what}: not within {within_s:.0f} s (last: {last})")
            time.sleep(0.05)

    def failure(self, what: str) -> BrowserError:
        """An error to raise, with a picture of the page and the end of its console."""
        number = len(list(self.chrome.pictures.glob("failure-*.png")))
        picture: Path | None = None
        with suppress(BrowserError):  # a page that answers no more
            picture = self.photograph(self.chrome.pictures / f"failure-{number}.png")
        console = "\n".join(f"    {line[:300]}" for line in self.console[-15:])
        return BrowserError(f"{what}\npicture: {picture}\nend of the console:\n{console}")

    def click(self, selector: str, what: str = "") -> None:
        """Click what a CSS selector or an expression finds, once it is still and uncovered."""
        spot = self.until(_SPOT % _element(selector), f"a place to click: {what or selector}")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=spot[0], y=spot[1], **pressed)

    def press(self, key: str) -> None:
        """One key, by its DOM name, for what has the focus."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def photograph(self, file: Path, part: tuple[int, int] | None = None) -> Path:
        """What the page shows, as PNG; or `part` of it, from one height in pixels to another."""
        options: dict[str, Any] = {}
        if part is not None:
            top, bottom = part
            clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top, "scale": 1}
            options = {"clip": clip, "captureBeyondViewport": True}
        got = self.call("Page.captureScreenshot", format="png", **options)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(got["data"]))
        return file


# The middle of an element, as [x, y], or null while it moves or something else lies over it.
_SPOT = """(async () => {
    const found = %s;
    if (!found) return null;
    found.scrollIntoView({block: "nearest", inline: "nearest"});
    const middle = () => {
        const box = found.getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
    };
    const before = middle();
    await new Promise(resolve => setTimeout(resolve, 50));
    const after = middle();
    if (before[0] !== after[0] || before[1] !== after[1]) return null;
    const top = document.elementFromPoint(...after);
    return found.contains(top) ? after : null;
})()"""


def _element(selector: str) -> str:
    if selector.startswith("("):
        return selector
    return f"document.querySelector({json.dumps(selector)})"


def _story(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description", details["text"]))


@contextmanager
def browser(folder: Path, pictures: Path | None = None) -> Iterator[Browser]:
    chrome = Browser(folder, pictures or folder / "pictures")
    try:
        yield chrome
    finally:
        chrome.stop()
