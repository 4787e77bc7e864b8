"""Build the editions of the labs, and report those that are out of step with their source."""

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from labkit.course.editions import (
    NOTEBOOKS,
    Notebook,
    labs,
    solved,
    solved_path,
    student,
    student_path,
)

CELL_LIMIT_S = 60
WIDGET = "application/vnd.jupyter.widget-view+json"  # without a kernel its picture is shown


def build(names: list[str], everything: bool = False) -> None:
    """Write both editions of each lab in `names` ("00"; all when empty) that is out of step, or of
    all with `everything`. Raises ValueError for an unknown lab."""
    chosen = [lab for lab in labs() if not names or {lab.name, lab.name[:2]} & set(names)]
    if len(chosen) < len(names):
        known = ", ".join(lab.name for lab in labs())
        raise ValueError(f"no source for all of {', '.join(names)}; there are {known}")
    for lab in chosen:
        if not everything and out_of_step(lab) == []:
            print(f"{lab.name}: in step")
            continue
        write(student(lab), student_path(lab))
        began_s = time.monotonic()
        write(execute(solved(lab)), solved_path(lab))
        print(f"{lab.name}: built, ran in {time.monotonic() - began_s:.1f} s")


def execute(notebook: Notebook) -> Notebook:
    """Run all cells in a fresh kernel of this Python, and keep their outputs in the notebook."""
    client = NotebookClient(
        notebook, timeout=CELL_LIMIT_S, kernel_name="python3", record_timing=False,
        store_widget_state=False, coalesce_streams=True, extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    )  # fmt: skip
    client.execute()
    notebook.metadata.language_info = {"name": "python"}  # not this machine's versions
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET, None)
            if "text" in output:  # of all that a cell printed, together, as a terminal leaves it:
                # a progress bar overwrites what it wrote before.
                output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
        if "outputs" in cell:
            cell.outputs = [one for one in cell.outputs if one.get("text") != ""]
    return notebook


def write(notebook: Notebook, path: Path) -> None:
    """A valid notebook, as a file."""
    path.parent.mkdir(exist_ok=True)
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def out_of_step(lab: Path) -> list[str]:
    """One sentence for each edition of `lab` that differs from its source. Outputs are not
    compared: they hold times and process numbers."""
    problems = []
    for path, fresh in ((student_path(lab), student(lab)), (solved_path(lab), solved(lab))):
        where = path.relative_to(NOTEBOOKS.parent).as_posix()
        if not path.exists():
            problems.append(f"{where} is missing: run `make notebooks`")
        elif _bare(nbformat.read(path, as_version=4)) != _bare(fresh):
            problems.append(
                f"{where} is out of step with notebooks/src/{lab.name}/lab.py: change the source, "
                "then run `make notebooks`"
            )
    return problems


def _bare(notebook: Notebook) -> list[object]:
    """Everything that comes from the source."""
    cells = [(x.id, x.cell_type, x.source, dict(x.metadata)) for x in notebook.cells]
    return [dict(notebook.metadata), *cells]


def main() -> None:
    """`python -m labkit.course.build [00 05 ...] [--all]`"""
    names = [word for word in sys.argv[1:] if word != "--all"]
    try:
        build(names, everything="--all" in sys.argv)
    except ValueError as error:
        sys.exit(f"labkit: {error}")


if __name__ == "__main__":
    main()
