"""Make the two editions of a lab from its one source: as notebooks in memory, as files, and a
report of the files that are out of sync with the source.

    notebooks/src/00_topic/lab.py ──> notebooks/00_topic.ipynb            student: stubs, no outputs
                                  ──> notebooks/solutions/00_topic.ipynb  solved, executed
    all labs' glossaries          ──> notebooks/GLOSSARY.md

A solution is between `### BEGIN SOLUTION` and `### END SOLUTION`, as in nbgrader. The student
edition has a stub in its place: the code in the cell's metadata, `stub="..."`, or a
`raise NotImplementedError("your turn: ...")` that names the function. A cell with the tag
"answer" is in the solved edition only.

Ids and metadata depend on the source alone, so two builds give the same notebook. This module is
beside the labs, not in the package, because only a checkout has the sources, and only `make setup`
installs the packages that build them.
"""

import hashlib
import re
import sys
import time
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import Any

import jupytext
import nbformat

from labkit.course.exercise import EXERCISES
from labkit.labs import FOLDERS, NOTEBOOKS

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
ANSWER = "answer"  # tag of a cell that a student must not see
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
LAYOUT = ("lines_to_next_cell", "lines_to_end_of_cell_marker")  # jupytext's notes on blank lines
CELL_LIMIT_S = 60
WIDGET = "application/vnd.jupyter.widget-view+json"  # without a kernel, its picture is shown

Notebook = Any  # nbformat's NotebookNode: a dict whose keys are also attributes


def labs() -> list[Path]:
    """The folders of all labs, in order; each contains the lab's source, `lab.py`."""
    return sorted(source.parent for source in (NOTEBOOKS / "src").glob("[0-9][0-9]_*/lab.py"))


def student_path(lab: Path) -> Path:
    """The path of a lab's student edition."""
    return NOTEBOOKS / f"{lab.name}.ipynb"


def solved_path(lab: Path) -> Path:
    """The path of a lab's solved edition."""
    return NOTEBOOKS / "solutions" / f"{lab.name}.ipynb"


def solved(lab: Path) -> Notebook:
    """The solved edition, not executed yet."""
    notebook = jupytext.read(lab / "lab.py", fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    ids, grade_ids = set[str](), set[str]()
    for cell in notebook.cells:
        for name in LAYOUT:
            cell.metadata.pop(name, None)
        cell.source = cell.source.strip("\n")
        cell.id = _unused(hashlib.sha256(cell.source.encode()).hexdigest()[:8], ids)
        if cell.cell_type == "code" and (grading := _nbgrader(cell.source, lab.name[:2])):
            grading["grade_id"] = _unused(grading["grade_id"], grade_ids)
            cell.metadata["nbgrader"] = grading
    return notebook


def student(lab: Path) -> Notebook:
    """The student edition: stubs replace the solutions, and cells with answers are left out."""
    notebook = solved(lab)
    notebook.cells = [x for x in notebook.cells if ANSWER not in x.metadata.get("tags", [])]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.source = without_solutions(cell.source, cell.metadata.get("stub"))
    for cell in notebook.cells:
        cell.metadata.pop("stub", None)
        if cell.cell_type == "markdown":  # links in the source are for the solved edition
            cell.source = cell.source.replace("](../GLOSSARY.md)", "](GLOSSARY.md)")
    # Start with empty predictions: the use of a skipped prediction then raises a clear error.
    made = [re.findall(r"^(\w+) = predict\(", cell.source, re.MULTILINE) for cell in code]
    new = dict.fromkeys(name for names in made[1:] for name in names if name not in made[0])
    if new:
        code[0].source += f"\n{' = '.join(new)} = predict()  # empty until section 3"
    return notebook


def without_solutions(text: str, stub: str | None = None) -> str:
    """`text` with a stub in place of each solution. Raises ValueError for unpaired markers."""
    kept: list[str] = []
    inside, name = False, "this"
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() == BEGIN and not inside:
            inside = True
            indent = line[: len(line) - len(line.lstrip())]
            lines = stub or f'raise NotImplementedError("your turn: write {name}")'
            kept += [indent + stub_line for stub_line in lines.splitlines()]
        elif line.strip() == END and inside:
            inside = False
        elif BEGIN in line or END in line:
            raise ValueError(f"line {number}, {line.strip()!r}: {BEGIN} and {END} must alternate")
        elif not inside:
            kept.append(line)
            if defined := re.match(r"\s*(?:def|class) (\w+)", line):
                name = defined[1]
    if inside:
        raise ValueError(f"{BEGIN} without {END} in the cell that begins {text.splitlines()[0]!r}")
    return "\n".join(kept)


def minutes(lab: Path) -> int:
    """An estimate of a student's time in minutes, rounded to 5: one minute per 200 words, one per
    code cell, 15 per exercise."""
    cells = student(lab).cells
    words = sum(len(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    code = sum(cell.cell_type == "code" for cell in cells)
    return 5 * round((words / 200 + code + 15 * len(exercises(lab.name[:2]))) / 5)


def glossary_path() -> Path:
    """The path of the glossary."""
    return NOTEBOOKS / "GLOSSARY.md"


def glossary() -> str:
    """The terms of all labs in a Markdown table. Raises ValueError if two labs define a term
    differently."""
    rows: dict[str, str] = {}
    where: dict[str, list[str]] = {}
    for lab in labs():
        text = (lab / "lab.py").read_text(encoding="utf-8").partition("# ### Glossary\n")[2]
        table = re.findall(r"^# \| (.+?) \| (.+) \|$", text.partition("# %%")[0], re.MULTILINE)
        for term, row in table[1:]:  # without the header row
            if rows.setdefault(term, row) != row:
                raise ValueError(f"{lab.name} defines {term!r} unlike lab {where[term][0]}")
            where.setdefault(term, []).append(lab.name)
    lines = [
        "# Glossary", "", "`make notebooks` makes this page from the glossaries of all labs.", "",
        "| English | 中文 | definition | labs |", "|---|---|---|---|",
    ]  # fmt: skip
    for term in sorted(rows, key=str.lower):
        links = ", ".join(f"[{name[:2]}]({name}.ipynb)" for name in where[term])
        lines.append(f"| {term} | {rows[term]} | {links} |")
    return "\n".join(lines) + "\n"


def checked(text: str) -> str | None:
    """The exercise that a cell checks: "average" of `check.average(average)`."""
    call = re.search(r"^check\.(\w+)\(", text, re.MULTILINE)
    return call[1] if call else None


def exercises(lab: str) -> dict[str, Any]:
    """name -> Exercise, for the lab with this number; empty if the lab has no checks."""
    if lab in FOLDERS:
        import_module(f"labkit.labs.lab_{lab}.checks")
    prefix = f"{lab}."
    return {n.removeprefix(prefix): x for n, x in EXERCISES.items() if n.startswith(prefix)}


def _nbgrader(text: str, lab: str) -> dict[str, Any] | None:
    """nbgrader's metadata for cells that a student fills in and for cells that give points."""
    facts: dict[str, Any] = {"grade": False, "solution": False, "locked": True}
    if BEGIN in text:
        words = re.search(r"^(?:def|class) (\w+)|^(\w+) = ", text, re.MULTILINE)
        name = "-".join(filter(None, words.groups())) if words else "cell"
        facts |= {"solution": True, "locked": False}
    elif re.search(rf"^from labkit\.labs\.lab_{lab} import checks as check$", text, re.MULTILINE):
        name = "imports"  # of the checks, which give the points
    elif (check := checked(text)) in exercises(lab):
        name = f"{check}-check"
        facts |= {"grade": True, "points": exercises(lab)[check].points}
    else:
        return None
    return facts | {"grade_id": f"{lab}-{name}", "schema_version": 3, "task": False}


def _unused(name: str, taken: set[str]) -> str:
    """`name`, with a number if it is taken. (A cell's id is made from its text, so other cells can
    be added or removed without changing it.)"""
    numbered = (f"{name}-{number}" for number in count(2))
    unused = next(free for free in chain([name], numbered) if free not in taken)
    taken.add(unused)
    return unused


def build(names: list[str], everything: bool = False) -> None:
    """Write both editions of each lab in `names` ("00"; empty means all labs), if they are out of
    sync or if `everything` is set. Raises ValueError for an unknown lab."""
    chosen = [lab for lab in labs() if not names or {lab.name, lab.name[:2]} & set(names)]
    if len(chosen) < len(names):
        known = ", ".join(lab.name for lab in labs())
        raise ValueError(f"no source for all of {', '.join(names)}; there are {known}")
    glossary_path().write_text(glossary(), encoding="utf-8")
    for lab in chosen:
        if not everything and out_of_step(lab) == []:
            print(f"{lab.name}: in sync")
            continue
        write(student(lab), student_path(lab))
        began_s = time.monotonic()
        write(execute(solved(lab)), solved_path(lab))
        print(f"{lab.name}: built, ran in {time.monotonic() - began_s:.1f} s")


def execute(notebook: Notebook) -> Notebook:
    """Run all cells in a fresh kernel of this Python, and keep their outputs in the notebook."""
    from nbclient import NotebookClient  # needed only to execute, not to make the editions

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
            if "text" in output:  # all text that a cell printed, as a terminal would show it:
                # a progress bar overwrites its earlier text.
                output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("text") != ""]
    return notebook


def write(notebook: Notebook, path: Path) -> None:
    """Validate a notebook and write it to a file."""
    path.parent.mkdir(exist_ok=True)
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def out_of_step(lab: Path) -> list[str]:
    """One sentence for each edition of `lab` that differs from its source. Outputs are not
    compared, because they contain times and process ids."""
    problems = []
    for path, fresh in ((student_path(lab), student(lab)), (solved_path(lab), solved(lab))):
        where = path.relative_to(NOTEBOOKS.parent).as_posix()
        if not path.exists():
            problems.append(f"{where} is missing: run `make notebooks`")
        elif _bare(nbformat.read(path, as_version=4)) != _bare(fresh):
            problems.append(
                f"{where} is out of sync with notebooks/src/{lab.name}/lab.py: change the source, "
                "then run `make notebooks`"
            )
    return problems


def _bare(notebook: Notebook) -> list[object]:
    """The parts of a notebook that come from the source."""
    cells = [(x.id, x.cell_type, x.source, dict(x.metadata)) for x in notebook.cells]
    return [dict(notebook.metadata), *cells]


def main() -> None:
    """`python notebooks/src/editions.py [00 05 ...] [--all]`"""
    names = [word for word in sys.argv[1:] if word != "--all"]
    try:
        build(names, everything="--all" in sys.argv)
    except ValueError as error:
        sys.exit(f"labkit: {error}")


if __name__ == "__main__":
    main()
