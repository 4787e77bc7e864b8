"""Run a lab as a script, where Jupyter is not installed: `python notebooks/src/as_script.py 05`.

The code cells of the lab's source, which contain the solutions, run in order in one process, as in
a notebook. Magics are translated. Each output that the notebook's tests compare is compared with
the solved edition. Cells that need Jupyter's widgets are skipped. The exit status is 1 if a cell
failed or printed something else.
"""

import io
import json
import os
import re
import sys
import time
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

SRC = Path(__file__).resolve().parent
CHECKED, RAISES = "nbval-check-output", "raises-exception"
NEEDS_JUPYTER = ("ipywidgets", "IPython")


class Cell(NamedTuple):
    """A code cell: its number from 1, its options such as tags, and its text."""

    number: int
    options: str
    text: str


def code_cells(source: str) -> list[Cell]:
    """The code cells of a lab's source, with magics as a notebook has them."""
    parts = re.split(r"^# %%(?!ranks|writefile)(.*)\n", source, flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    code = [(options, text) for options, text in pairs if "[markdown]" not in options]
    return [
        Cell(n, options, re.sub(r"^# (%.*)$", r"\1", text, flags=re.MULTILINE).strip("\n"))
        for n, (options, text) in enumerate(code, 1)
    ]


class Script:
    """Runs cells in a namespace that takes the place of `__main__`."""

    def __init__(self, name: str):
        from labkit.runtime import cells

        self.name, self._run = name, cells.run
        sys.modules["__main__"] = main = ModuleType("__main__")
        self.namespace = main.__dict__
        self.namespace["display"] = lambda *values: print(*map(repr, values), sep="\n")
        self._magics = _rank_magics(self.namespace)

    def run(self, cell: Cell) -> Any:
        """Run a cell; returns the value of its last expression."""
        first, _, rest = cell.text.partition("\n")
        if first.startswith("%%ranks"):
            return self._magics.ranks(first.removeprefix("%%ranks"), rest)
        if first.startswith("%%writefile "):
            path = Path(first.split()[1])
            path.parent.mkdir(exist_ok=True)
            return print(path.write_text(rest + "\n", encoding="utf-8"), "characters written")
        text = re.sub(r"^%load_ext labkit$", "", cell.text, flags=re.MULTILINE)
        return self._run(text, f"<{self.name}, cell {cell.number}>", self.namespace)


def _rank_magics(namespace: dict[str, Any]) -> Any:
    """`%%ranks` of `labkit.runtime.magics`, which asks IPython for no more than these names."""
    from labkit.runtime import world  # noqa: F401, before IPython is replaced

    stand_ins: dict[str, dict[str, Any]] = {
        "IPython.core.error": {"UsageError": ValueError},
        "IPython.core.magic": {
            "Magics": object, "magics_class": lambda cls: cls, "cell_magic": lambda method: method,
            "line_magic": lambda name: lambda method: method,
        },
    }  # fmt: skip
    hidden = {name: sys.modules.get(name) for name in ("IPython", "IPython.core", *stand_ins)}
    for name in hidden:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(stand_ins.get(name, {}))
    from labkit.runtime.magics import RankMagics

    for name, module in hidden.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
    magics = RankMagics()
    magics.shell = SimpleNamespace(user_ns=namespace)
    return magics


class Tee(io.StringIO):
    """Keeps what is printed, and prints it."""

    def write(self, text: str) -> int:
        assert sys.__stdout__ is not None
        sys.__stdout__.write(text)
        return super().write(text)


def run_lab(folder: Path) -> int:
    """Run a lab and print each cell's problem; returns the number of cells with a problem."""
    solved = json.loads((SRC.parent / "solutions" / f"{folder.name}.ipynb").read_text("utf-8"))
    outputs = [cell["outputs"] for cell in solved["cells"] if cell["cell_type"] == "code"]
    script, problems = Script(folder.name), 0
    cells = code_cells((folder / "lab.py").read_text(encoding="utf-8"))
    for cell, expected in zip(cells, outputs, strict=True):
        began_s = time.monotonic()
        problem = _problem(script, cell, expected)
        problems += bool(problem)
        if problem:
            print(f"@@@ cell {cell.number}, {cell.text[:60]!r}: {problem}\n@@@")
        print(f"### cell {cell.number}: {time.monotonic() - began_s:.1f} s", flush=True)
    return problems


def _problem(script: Script, cell: Cell, expected: list[Any]) -> str:
    with redirect_stdout(Tee()) as printed:
        try:
            value = script.run(cell)
        except ImportError as error:
            if any(name in str(error) for name in NEEDS_JUPYTER):
                return print("skipped: it needs Jupyter") or ""
            return "".join(traceback.format_exception(error))
        except Exception as error:
            return "" if RAISES in cell.options else "".join(traceback.format_exception(error))
    if RAISES in cell.options:
        return "it raised nothing"
    if value is not None:
        print(repr(value)[:2000])
    if CHECKED not in cell.options:
        return ""
    before, now = _text(expected), printed.getvalue()
    now = re.sub(r"[^\n]*\r(?!\n)", "", now)  # progress bars
    if value is not None and not before.endswith(HTML):
        now += repr(value)
    same = before.removesuffix(HTML).split() == now.split()
    return "" if same else f"the solved edition has\n{before}\nbut this run has\n{now}"


HTML = "<a page>"


def _text(outputs: list[Any]) -> str:
    """What a cell of the solved edition printed, and its value as text; HTML if it has no text."""
    printed = "".join("".join(x["text"]) for x in outputs if x.get("name") == "stdout")
    values = [x["data"] for x in outputs if "data" in x]
    pages = any("image/png" in data or "text/html" in data for data in values)
    return printed + (HTML if pages else "".join("".join(x["text/plain"]) for x in values))


def main() -> None:
    if len(sys.argv) != 2 or not (found := list(SRC.glob(f"{sys.argv[1]}_*/lab.py"))):
        sys.exit("labkit: name one lab by its number, as in: python notebooks/src/as_script.py 05")
    os.chdir(SRC.parent)
    problems = run_lab(found[0].parent)
    print(f"{found[0].parent.name}: {problems or 'no'} problems")
    sys.stdout.flush()
    sys.exit(min(problems, 1))


if __name__ == "__main__":
    main()
