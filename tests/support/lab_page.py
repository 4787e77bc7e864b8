"""JupyterLab as its users have it: a server of its own, and a notebook open in a browser. Actions
are real clicks and keys; counts and outputs are read from JupyterLab's model, since a page holds
only the cells in view."""

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools import WIDTH, WITHIN_S, Browser, BrowserError, Page
from provoke import ROOT, stop_tree, until

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
        until(lambda: self._written() or self.process.poll() is not None, WITHIN_S)
        if self._written():
            self.url = self._written()
            if until(self._answers, WITHIN_S):
                return self.url
        self.close()
        log = (self.folder / "server.log").read_text()[-3000:]
        raise BrowserError(f"JupyterLab did not start within {WITHIN_S} s; it said:\n{log}")

    def _written(self) -> str:
        for file in (self.folder / "runtime").glob(f"jpserver-{self.process.pid}.json"):
            return str(json.loads(file.read_text())["url"])
        return ""

    def _answers(self) -> bool:
        try:
            return "version" in self.ask("GET", "")
        except OSError:
            return False

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
    const panel = {NOTEBOOK};
    return panel.context.isReady && panel.sessionContext.session?.kernel?.status === "idle";
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


# Scroll to a screen of the notebook, counted from 0, and let it be painted. Below the last cell
# comes room that is empty.
_SCROLL = f"""(async () => {{
    const pane = {NOTEBOOK}.content.node.querySelector(".jp-WindowedPanel-outer");
    pane.scrollTop = %d * pane.clientHeight;
    await new Promise(resolve => setTimeout(() => requestAnimationFrame(resolve), 100));
    const cells = pane.querySelectorAll(".jp-Cell");
    const end = cells[cells.length - 1].getBoundingClientRect().bottom;
    return {{last: end <= pane.getBoundingClientRect().bottom}};
}})()"""

# Where the last cell ends, in pixels, or null while cells are being put there.
_END = f"""(async () => {{
    const end = () => {{
        const cells = {NOTEBOOK}.content.node.querySelectorAll(".jp-Cell");
        return cells[cells.length - 1].getBoundingClientRect().bottom;
    }};
    const before = end();
    await new Promise(resolve => setTimeout(() => requestAnimationFrame(resolve), 300));
    return before === end() ? before : null;
}})()"""


class LabPage:
    """A notebook of the server, open in a browser with nothing else beside it."""

    def __init__(self, lab: JupyterLab, chrome: Browser, name: str):
        self.lab, self.chrome, self.name = lab, chrome, name
        workspace = f"lab/workspaces/{secrets.token_hex(4)}"
        self.page: Page = chrome.open(f"{lab.url}{workspace}/tree/{name}?token={lab.token}")
        self.page.until(f"{DIALOG} || {READY}", f"{name} is open and its kernel waits")
        if asked := self.page.value(DIALOG):  # such as which kernel, when the notebook names none
            raise self.page.failure(f"{name}: JupyterLab asks instead of opening it: {asked!r}")

    def cells(self) -> list[Cell]:
        return [Cell(**fields) for fields in self.page.value(CELLS)]

    def menu(self, title: str, command: str) -> None:
        self.page.click(
            "([...document.querySelectorAll('.lm-MenuBar-item')]"
            f".find(item => item.textContent.trim() === {json.dumps(title)}))",
            f"the menu {title}",
        )
        self.page.click(f".lm-Menu-item[data-command='{command}']", f"{command} in its menu")

    def tool(self, command: str) -> None:
        self.page.click(f".jp-NotebookPanel-toolbar [data-command='{command}']")

    def run_all(self) -> None:
        self.menu("Run", "runmenu:run-all")

    def select(self, index: int) -> None:
        """Click beside the code of code cell `index`."""
        cell = f"document.querySelectorAll('.jp-CodeCell')[{index}]"
        self.page.click(f"({cell}.querySelector('.jp-InputPrompt'))", f"code cell {index}")

    def theme(self, name: str) -> None:
        choice = json.dumps({"theme": name})
        self.page.value(f"jupyterapp.commands.execute('apputils:change-theme', {choice})")
        self.page.until(f"document.body.dataset.jpThemeName === {json.dumps(name)}", name)
        self.page.until("!document.querySelector('#jupyterlab-splash')", f"{name}, with no splash")

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
        raise self.page.failure(f"{self.name}: {what}: not so within {within_s:.0f} s\n{said}")

    def photograph_all(self, folder: Path) -> None:
        """One picture for each screen of the notebook, from its top to its end."""
        for number in range(1, 41):
            top = self.page.value(_SCROLL % (number - 1))
            self.page.photograph(folder / f"{Path(self.name).stem}-{number:02d}.png")
            if top["last"]:
                break

    def show_whole(self) -> None:
        """Make the window so high that all cells are in it."""
        self.page.resize(WIDTH, 30_000)
        end = self.page.until(_END, "the cells stand still")
        self.page.resize(WIDTH, int(end) + 100)

    def close(self) -> None:
        """Close the tab and shut its kernel down."""
        self.chrome.close(self.page)
        for session in self.lab.ask("GET", "sessions"):
            if session["path"] == self.name:
                self.lab.ask("DELETE", f"sessions/{session['id']}")


def notebook(lab: JupyterLab, chrome: Browser, name: str) -> closing[LabPage]:
    return closing(LabPage(lab, chrome, name))
