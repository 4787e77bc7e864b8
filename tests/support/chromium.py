"""Playwright drives Debian's chromium or Google Chrome, without a window, for tests and
screenshots. Playwright's own browsers are not used."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH, HEIGHT = 1366, 768  # the screen of a small laptop, in CSS pixels
WITHIN_S = 60.0  # how long a page may take for one action: patient, since machines can be busy
NAMES = (
    "chromium",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)


def missing() -> str:
    """Why no browser can start here, or an empty string."""
    if importlib.util.find_spec("playwright") is None:
        return "needs the package playwright, which drives a browser"
    if executable() is None:
        return "needs a browser: apt-get install chromium"
    return ""


def executable() -> str | None:
    """Not one from snap: its private /tmp hides the profile from it."""
    found = (path for path in map(shutil.which, NAMES) if path and not path.startswith("/snap/"))
    return next(found, None)


@contextmanager
def browser_page(pictures: Path) -> Iterator["Page"]:
    """A tab of a new browser with an empty home; both end with the block, where an error gets a
    screenshot in `pictures` and the end of the page's console."""
    from playwright.sync_api import sync_playwright

    console: list[str] = []
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as home,
        sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path=executable(), env={**os.environ, "HOME": home}
        ) as chrome,
    ):
        page = chrome.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(1000 * WITHIN_S)
        page.on("console", lambda message: console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: console.append(f"uncaught: {error}"))
        try:
            yield page
        except Exception as error:
            picture = pictures / f"failure-{len(list(pictures.glob('failure-*.png')))}.png"
            with suppress(Exception):  # a page that no longer answers
                page.screenshot(path=picture)
            lines = [f"    {line[:300]}" for line in console if not line.startswith("debug: ")]
            error.add_note("\n".join([f"picture: {picture}", "end of the console:", *lines[-15:]]))
            raise


def photograph(page: "Page", out: Path, cut: int = 0) -> list[Path]:
    """The whole page as PNG, or pictures OUT-01.png and so on, each `cut` pixels high."""
    height = int(page.evaluate("document.documentElement.scrollHeight"))
    pictures = []
    for number, top in enumerate(range(0, height, cut or height), start=1):
        name = out.with_stem(f"{out.stem}-{number:02d}") if cut else out
        part = {"x": 0, "y": top, "width": WIDTH, "height": min(cut or height, height - top)}
        page.screenshot(path=name, full_page=True, clip=part)
        pictures.append(name)
    return pictures
