"""Photograph a notebook as it reads on a web page, to look at it: 1366 pixels wide, to its end.

    python tests/support/browser.py NOTEBOOK.ipynb OUT.png [--dark] [--lab] [--cut PIXELS]

It is exported to HTML by nbconvert, with the outputs that it has; nothing runs. That page takes
MathJax, for its formulas, from the internet. `--lab` opens the notebook in JupyterLab instead,
which has its own. `--cut 1500` writes OUT-01.png, OUT-02.png and so on, each 1500 pixels high.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from nbconvert import HTMLExporter

from chromium import browser_page, missing, photograph
from lab_page import LabPage, jupyterlab

# All pictures are there; and, where MathJax could be loaded, all formulas are set.
LOADED = """(async () => {
    if (document.readyState !== "complete") return false;
    if (window.MathJax?.Hub) await new Promise(done => MathJax.Hub.Queue(() => done()));
    await document.fonts.ready;
    return [...document.images].every(picture => picture.complete);
})()"""
FORMULAS_LEFT = "!window.MathJax?.Hub && document.body.innerText.includes('$')"


def on_a_page(page: Any, chosen: argparse.Namespace, folder: Path) -> None:
    theme = "dark" if chosen.dark else "light"
    html, _ = HTMLExporter(theme=theme).from_filename(str(chosen.notebook))
    (folder / "page.html").write_text(html, encoding="utf-8")
    page.goto((folder / "page.html").as_uri())
    page.wait_for_function(LOADED)
    if page.evaluate(FORMULAS_LEFT):
        print("the formulas are not set: no MathJax without internet; --lab sets them")
    print(*photograph(page, chosen.out, chosen.cut), sep="\n")


def in_the_lab(page: Any, chosen: argparse.Namespace, folder: Path) -> None:
    root = folder / "notebooks"
    root.mkdir()
    shutil.copy(chosen.notebook, root)
    with jupyterlab(folder, root) as lab:
        opened = LabPage(lab, page, chosen.notebook.name)
        if chosen.dark:
            opened.theme("JupyterLab Dark")
        opened.show_whole()
        print(*photograph(page, chosen.out, chosen.cut), sep="\n")


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
    with tempfile.TemporaryDirectory() as name, browser_page(chosen.out.parent) as page:
        take(page, chosen, Path(name))


if __name__ == "__main__":
    main()
