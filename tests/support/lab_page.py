"""JupyterLab as its users have it: a server of its own, and a notebook open in a browser. Actions
are real clicks and keys; counts and outputs are read from JupyterLab's model, since a page holds
only the cells in view."""

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chromium import WIDTH, WITHIN_S, browser_page
from provoke import ROOT, stop_tree, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/apputils-extension:themes": {"theme": "JupyterLab Light"},
}


class JupyterLab:
    """The server of the notebooks in `root`, with settings and data of its own in `folder`."""

    def __init__(self, folder: Path, root: Path):
        self.folder, self.root, self.token = folder, root, secrets.token_hex(16)
        self.left: list[str] = []
        defaults = folder / "config/labconfig/default_setting_overrides.json"
        defaults.parent.mkdir(parents=True)
        defaults.write_text(json.dumps(SETTINGS))
        own = {
            "JUPYTER_CONFIG_DIR": folder / "config",
            "JUPYTER_DATA_DIR": folder / "data",
            "JUPYTER_RUNTIME_DIR": folder / "runtime",
            "JUPYTERLAB_SETTINGS_DIR": folder / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
            "IPYTHONDIR": folder / "ipython",
            "PYTHONPATH": ROOT,
        }
        with (folder / "server.log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jupyterlab", str(root)),
                    *("--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"),
                    f"--IdentityProvider.token={self.token}",
                    "--expose-app-in-browser",  # window.jupyterapp, to read what a notebook holds
                ],
                stdout=log,
                stderr=log,
                env=os.environ | {name: str(value) for name, value in own.items()},
            )
        self.url = self._url()

    def _url(self) -> str:
        """Written once the server accepts connections."""
        until(lambda: self._written() or self.process.poll() is not None, WITHIN_S)
        if url := self._written():
            return url
        self.close()
        log = (self.folder / "server.log").read_text()[-3000:]
        raise RuntimeError(f"JupyterLab did not start within {WITHIN_S} s; it said:\n{log}")

    def _written(self) -> str:
        for file in (self.folder / "runtime").glob(f"jpserver-{self.process.pid}.json"):
            return str(json.loads(file.read_text())["url"])
        return ""

    def ask(self, method: str, what: str) -> Any:
        """The server's REST interface: `ask("GET", "sessions")`."""
        request = urllib.request.Request(
            f"{self.url}api/{what}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=WITHIN_S) as got:
            text = got.read().decode()
        return json.loads(text) if text else None

    def close(self) -> None:
        """End it, its kernels and their ranks; `left` names those that had to be killed."""
        self.left = stop_tree(self.process)


def jupyterlab(folder: Path, root: Path) -> closing[JupyterLab]:
    return closing(JupyterLab(folder, root))


@dataclass
class Cell:
    source: str
    tags: list[str]
    count: int | None  # None: not run
    running: bool
    outputs: list[dict[str, Any]]

    @property
    def error(self) -> str:
        return next((out["ename"] for out in self.outputs if out["output_type"] == "error"), "")

    @property
    def text(self) -> str:
        """All that it says: what is printed, shown and raised."""
        words: list[str] = []
        for out in self.outputs:
            words += [out.get("text", ""), out.get("evalue", "")]
            words += [out.get("data", {}).get("text/plain", "")]
        return "".join("".join(word) for word in words)

    @property
    def failed(self) -> bool:
        return bool(self.error) and "raises-exception" not in self.tags


NOTEBOOK = "[...jupyterapp.shell.widgets('main')].find(widget => widget.sessionContext)"
DIALOG = "(document.querySelector('.jp-Dialog-content') || {}).innerText"
READY = f"""(() => {{
    const panel = window.jupyterapp && {NOTEBOOK};
    return panel?.context.isReady && panel.sessionContext.session?.kernel?.status === "idle";
}})()"""
CELLS = f"""{NOTEBOOK}.content.widgets
    .map((cell, index) => [cell, index])
    .filter(([cell]) => cell.model.type === "code" && cell.model.sharedModel.source.trim())
    .map(([cell, index]) => ({{
        source: cell.model.sharedModel.source,
        tags: cell.model.getMetadata("tags") || [],
        count: cell.model.executionCount,
        running: cell.model.executionState !== "idle",
        outputs: cell.model.outputs.toJSON(),
    }}))"""


# Where the last cell ends, in pixels from the top, or null while cells are being put there.
END = f"""(async () => {{
    const notebook = {NOTEBOOK}.content.node;
    notebook.querySelector(".jp-WindowedPanel-outer").scrollTop = 0;
    const cells = notebook.getElementsByClassName("jp-Cell");
    const end = () => [...cells].at(-1).getBoundingClientRect().bottom;
    const before = end();
    await new Promise(resolve => setTimeout(() => requestAnimationFrame(resolve), 300));
    return before === end() ? before : null;
}})()"""


class LabPage:
    """A notebook of the server, opened in a tab with nothing else beside it."""

    def __init__(self, lab: JupyterLab, page: "Page", name: str):
        self.page, self.name = page, name
        workspace = f"lab/workspaces/{secrets.token_hex(4)}"
        page.goto(f"{lab.url}{workspace}/tree/{name}?token={lab.token}")
        page.wait_for_function(f"{DIALOG} || {READY}")
        asked = page.evaluate(DIALOG)  # such as which kernel, when the notebook names none
        assert not asked, f"{name}: JupyterLab asks instead of opening it: {asked!r}"

    def cells(self) -> list[Cell]:
        return [Cell(**fields) for fields in self.page.evaluate(CELLS)]

    def tool(self, command: str) -> None:
        self.page.click(f".jp-NotebookPanel-toolbar [data-command='{command}']")

    def run_all(self) -> None:
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.click(".lm-Menu-item[data-command='runmenu:run-all']")

    def select(self, index: int) -> None:
        """Click beside the code of code cell `index`."""
        self.page.locator(".jp-CodeCell").nth(index).locator(".jp-InputPrompt").click()

    def theme(self, name: str) -> None:
        change = "theme => jupyterapp.commands.execute('apputils:change-theme', {theme})"
        self.page.evaluate(change, name)
        self.page.wait_for_selector(f"body[data-jp-theme-name='{name}']", state="attached")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")

    def wait_for(
        self, ready: Callable[[list[Cell]], bool], what: str, within_s: float = WITHIN_S
    ) -> list[Cell]:
        """The code cells, once `ready(cells)`."""
        cells: list[Cell] = []

        def look() -> bool:
            cells[:] = self.cells()
            return ready(cells)

        if until(look, within_s):
            return cells
        said = "\n".join(f"[{cell.count}] {cell.text[-500:]}" for cell in cells)
        raise AssertionError(f"{self.name}: {what}: not so within {within_s:.0f} s\n{said}")

    def show_whole(self) -> None:
        """Make the window so high that all cells are in it."""
        self.page.set_viewport_size({"width": WIDTH, "height": 30_000})
        end = self.page.wait_for_function(END).json_value()
        self.page.set_viewport_size({"width": WIDTH, "height": int(end) + 100})


@contextmanager
def notebook(lab: JupyterLab, name: str, pictures: Path) -> Iterator[LabPage]:
    """`name` in a browser for the block; its kernel is shut down at the end."""
    try:
        with browser_page(pictures) as page:
            yield LabPage(lab, page, name)
    finally:
        for session in lab.ask("GET", "sessions"):
            if session["path"] == name:
                lab.ask("DELETE", f"sessions/{session['id']}")
