"""Photograph a notebook as it reads on a web page, to look at it: 1366 pixels wide, to its end.

    python tests/support/browser.py NOTEBOOK.ipynb OUT.png [--dark] [--lab] [--cut PIXELS]

It is exported to HTML by nbconvert, with the outputs that it has; nothing runs. That page takes
MathJax, for its formulas, from the internet. `--lab` opens the notebook in JupyterLab instead,
which has its own. `--cut 1500` writes OUT-01.png, OUT-02.png and so on, each 1500 pixels high.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from devtools import Browser, Page, browser, missing
from lab_page import jupyterlab, notebook

# All pictures are there; and, where MathJax could be loaded, all formulas are set.
LOADED = """(async () => {
    if (document.readyState !== "complete") return false;
    if (window.MathJax?.Hub) await new Promise(done => MathJax.Hub.Queue(() => done()));
    await document.fonts.ready;
    return [...document.images].every(picture => picture.complete);
})()"""
FORMULAS_LEFT = "!window.MathJax?.Hub && document.body.innerText.includes('$')"


def export(file: Path, folder: Path, dark: bool) -> Path:
    theme = "dark" if dark else "light"
    subprocess.run(
        [
            *(sys.executable, "-m", "nbconvert", "--to", "html", "--theme", theme),
            *("--log-level", "WARN", "--output-dir", str(folder), "--output", "page", str(file)),
        ],
        check=True,
    )
    return folder / "page.html"


def on_a_page(file: Path, out: Path, dark: bool, cut: int, chrome: Browser, folder: Path) -> None:
    page = chrome.open(export(file, folder, dark).as_uri())
    page.until(LOADED, "the page is loaded")
    if page.value(FORMULAS_LEFT):
        print("the formulas are not set: no MathJax without internet; --lab sets them")
    photograph(page, out, cut)


def in_the_lab(file: Path, out: Path, dark: bool, cut: int, chrome: Browser, folder: Path) -> None:
    root = folder / "notebooks"
    root.mkdir()
    shutil.copy(file, root)
    with jupyterlab(folder, root) as lab, notebook(lab, chrome, file.name) as opened:
        if dark:
            opened.theme("JupyterLab Dark")
        opened.show_whole()
        photograph(opened.page, out, cut)


def photograph(page: Page, out: Path, cut: int) -> None:
    page.call("Emulation.setScrollbarsHidden", hidden=True)
    height = int(page.call("Page.getLayoutMetrics")["cssContentSize"]["height"])
    tops = range(0, height, cut or height)
    for number, top in enumerate(tops, start=1):
        name = out.with_stem(f"{out.stem}-{number:02d}") if cut else out
        print(page.photograph(name, part=(top, min(top + (cut or height), height))))


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument("out", type=Path, help="a PNG file")
    parser.add_argument("--dark", action="store_true", help="in the dark theme")
    parser.add_argument("--lab", action="store_true", help="in JupyterLab, not as a web page")
    parser.add_argument(
        "--cut", type=int, default=0, help="into pictures of so many pixels' height"
    )
    chosen = parser.parse_args()
    if not chosen.notebook.is_file():
        parser.error(f"{chosen.notebook}: there is no such notebook")
    if reason := missing():
        parser.error(reason)
    take = in_the_lab if chosen.lab else on_a_page
    with tempfile.TemporaryDirectory() as name, browser(Path(name) / "browser") as chrome:
        take(chosen.notebook, chosen.out, chosen.dark, chosen.cut, chrome, Path(name))


if __name__ == "__main__":
    main()
