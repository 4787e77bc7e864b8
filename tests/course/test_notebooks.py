"""The labs: editions in sync with their source, the form of a lab, and outputs as shown."""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from command import python, run
from places import ROOT

pytest.importorskip("jupytext", reason="the labs are built with jupytext")
pytest.importorskip("nbclient", reason="the labs are run by nbclient")

import nbformat

import as_script
import editions
from editions import (
    BEGIN,
    END,
    checked,
    exercises,
    labs,
    minutes,
    out_of_step,
    solved,
    solved_path,
    student,
    student_path,
    without_solutions,
)
from labkit.course import EXERCISES, Exercise
from labkit.course.source import show
from tables import cases, raises

LABS = labs()
each_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)

STEPS = [
    "The question", "The idea", "Predict", "Read it", "Run it", "Break it", "Build it",
    "In the wild",
]  # fmt: skip
MOST_LINES = 25  # of a cell
MOST_WORDS = 130  # of the prose of a cell
CHINESE = re.compile("[\u4e00-\u9fff]")


@each_lab
def test_the_editions_are_in_step_with_the_source(lab: Path):
    assert out_of_step(lab) == []


@each_lab
def test_a_lab_as_a_script_has_the_cells_of_the_notebook(lab: Path):
    cells = as_script.code_cells((lab / "lab.py").read_text(encoding="utf-8"))
    assert [x.text for x in cells] == [x.source for x in solved(lab).cells if x.cell_type == "code"]


SCRIPT = """
# %% tags=["nbval-check-output"]
# %load_ext labkit
"same"
# %% tags=["nbval-check-output"]
# %%ranks
rank + 5
# %% tags=["raises-exception"]
1 / 0
# %% tags=["raises-exception"]
fine = 1
# %% tags=["nbval-check-output"]
print("now")
"""


def test_a_lab_as_a_script_reports_what_differs(tmp_path: Path):
    for folder in (tmp_path / "solutions", tmp_path / "src" / "99_fake"):
        folder.mkdir(parents=True)
    (folder / "lab.py").write_text(SCRIPT)
    printed = ["'same'", " ".join(f"rank {r}: {r + 5}" for r in range(4)), "", "", "then"]
    cells = [{"cell_type": "code", "outputs": [{"name": "stdout", "text": [x]}]} for x in printed]
    (tmp_path / "solutions" / "99_fake.ipynb").write_text(json.dumps({"cells": cells}))
    program = """import sys, pathlib; sys.path.append(sys.argv[1]); import as_script
as_script.SRC = pathlib.Path(sys.argv[2]); as_script.run_lab(as_script.SRC / "99_fake")"""
    done = python("-c", program, ROOT / "notebooks/src", tmp_path / "src").stdout
    problems = re.findall(r"@@@ cell (\d), .*?: (.*)", done)
    assert problems == [("4", "it raised nothing"), ("5", "the solved edition has")], done


def test_there_is_no_notebook_without_a_source():
    known = {lab.name for lab in LABS}
    folder = ROOT / "notebooks"
    assert {path.stem for path in [*folder.glob("*.ipynb"), *folder.glob("solutions/*")]} == known


@pytest.mark.parametrize("page", ["README.md", "notebooks/README.md"])
@each_lab
def test_every_lab_is_in_the_tables(lab: Path, page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| .*\b{lab.name}\.ipynb\).*", text, re.MULTILINE)
    assert f"solutions/{lab.name}.ipynb)" in row and f"| {minutes(lab)} |" in row


@each_lab
def test_all_the_code_that_it_shows_is_there(lab: Path):
    """Finds moved code at once; nbval finds it a quarter of an hour later."""
    shown = []
    for cell in solved(lab).cells:
        if cell.cell_type == "code" and re.search(r"^show\(\s*\"", cell.source, re.MULTILINE):
            calls = [x for x in ast.walk(ast.parse(cell.source)) if isinstance(x, ast.Call)]
            of_show = [call for call in calls if getattr(call.func, "id", "") == "show"]
            shown += [eval(ast.unparse(call), {"show": show}) for call in of_show]
    assert all(code.text for code in shown)


def form_problems(lab: Path) -> list[str]:
    notebook = solved(lab)
    cells, problems = notebook.cells, []
    if not re.match(r"# .+", cells[0].source) or cells[0].cell_type != "markdown":
        problems.append("the first cell is not a title: # Lab 00: ...")
    for cell in cells:
        problems += size_problems(cell)
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    headings = re.findall(r"^## (\d)\. ([^:\n]+)", "\n".join(prose), re.MULTILINE)
    if headings != [(str(i), step) for i, step in enumerate(STEPS, 1)]:
        problems.append(f"the eight sections are missing or out of order: {headings}")
    glossary = [text for text in prose if "glossary" in text.lower()]
    rows = [row for text in glossary for row in text.splitlines() if row.startswith("|")]
    if sum(bool(CHINESE.search(row)) for row in rows) < 4:
        problems.append("no glossary: a table with the Chinese words beside the English ones")
    return problems + exercise_problems(notebook, exercises(lab.name[:2]))


def size_problems(cell: Any) -> list[str]:
    begin, text = repr(cell.source[:40]), cell.source
    lines = text.splitlines()
    found = []
    if len(lines) > MOST_LINES:
        found.append(f"the cell {begin} has {len(lines)} lines: at most {MOST_LINES}, split it")
    if cell.cell_type == "markdown":
        pictures = re.compile(r"```.*?```|^\|.*?$", re.DOTALL | re.MULTILINE)
        words = len(pictures.sub("", text).split())
        if words > MOST_WORDS:
            found.append(f"the cell {begin} has {words} words: at most {MOST_WORDS}, split it")
    return found


def exercise_problems(notebook: Any, declared: dict[str, Any]) -> list[str]:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    called = [name for cell in code if (name := checked(cell.source))]
    problems = [f"{name} has a check, but no cell" for name in declared.keys() - set(called)]
    problems += [f"check.{name} is not declared" for name in set(called) - declared.keys()]
    if len(called) < 3:
        problems.append(f"{len(called)} exercises: a lab has three or more")
    headings = sum(cell.source.count("### Exercise") for cell in notebook.cells)
    if headings != len(called):
        problems.append(f"{headings} headings '### Exercise ...' for {len(called)} checks")
    for cell in code:
        if checked(cell.source) and BEGIN in cell.source:
            problems.append("a check needs a separate cell, without the solution")
    return problems


@each_lab
def test_a_lab_has_the_form_of_a_lab(lab: Path):
    problems = form_problems(lab)
    assert problems == [], "\n".join(["", *problems])


@each_lab
def test_the_student_edition_gives_nothing_away(lab: Path):
    notebook = student(lab)
    text = nbformat.writes(notebook)
    assert BEGIN not in text and END not in text
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert text.count("your turn") + text.count("...") >= 3, "the student edition has too few stubs"


@each_lab
def test_the_solved_edition_has_outputs_and_no_trace_of_its_machine(lab: Path):
    notebook = nbformat.read(solved_path(lab), as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    outputs = re.sub(r'"image/png": ".*"', "", nbformat.writes(notebook))  # may spell /tmp/
    for trace in (str(ROOT), str(Path.home()) + "/", "/tmp/", "ipykernel_"):
        assert trace not in outputs, f"an output has {trace}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@each_lab
def test_the_solved_edition_runs_as_it_is_shown(lab: Path):
    """nbval runs every cell, and compares the outputs of those tagged nbval-check-output."""
    pytest.importorskip("nbval", reason="compares the outputs of notebooks")
    run_nbval(solved_path(lab))


def run_nbval(*paths: Path, status: int = 0) -> str:
    options = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=60"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *paths]
    return run(*command, status=status, cwd=ROOT, timeout=280).stdout


@pytest.mark.slow
def test_nbval_sees_a_tagged_output_that_changed(tmp_path: Path):
    pytest.importorskip("nbval", reason="compares the outputs of notebooks")
    for name, output in (("same", "2"), ("changed", "3")):
        notebook = nbformat.v4.new_notebook(metadata=editions.METADATA)
        cell = nbformat.v4.new_code_cell(
            "1 + 1", execution_count=1, metadata={"tags": ["nbval-check-output"]}
        )
        cell.outputs = [nbformat.v4.new_output("execute_result", {"text/plain": output})]
        notebook.cells = [cell]
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    report = run_nbval(tmp_path / "same.ipynb", tmp_path / "changed.ipynb", status=1)
    assert "Cell outputs differ" in report and "1 failed, 1 passed" in report, report


LAB = '''# %% [markdown]
# # Lab 99: A test

# %%
def half(x):
    """Half of x."""
    ### BEGIN SOLUTION
    return x / 2
    ### END SOLUTION


# %% stub="guess = ..."
### BEGIN SOLUTION
guess = 4
### END SOLUTION

# %% tags=["answer"]
print("the answer is 4")

# %%
half(8) if callable(half) else guess
'''


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(editions, "NOTEBOOKS", tmp_path / "notebooks")
    folder = tmp_path / "notebooks" / "src" / "99_test"
    folder.mkdir(parents=True)
    (folder / "lab.py").write_text(LAB)
    return folder


def test_stubs_stand_where_the_solutions_are(lab: Path):
    texts = [cell.source for cell in student(lab).cells]
    assert texts[1] == (
        'def half(x):\n    """Half of x."""\n    raise NotImplementedError("your turn: write half")'
    )
    assert texts[2] == "guess = ..."
    assert len(texts) == 4 and "the answer is 4" not in "".join(texts)
    assert "stub" not in nbformat.writes(student(lab))
    assert "return x / 2" in solved(lab).cells[1].source


def test_cells_keep_their_ids_when_others_come(lab: Path):
    before = [cell.id for cell in solved(lab).cells]
    (lab / "lab.py").write_text(LAB.replace("# %%\ndef", "# %%\nx = 1\n\n# %%\ndef", 1))
    after = [cell.id for cell in solved(lab).cells]
    assert len(after) == len(before) + 1 and set(before) < set(after)
    (lab / "lab.py").write_text(LAB + "\n# %%\n1\n\n# %%\n1\n")
    ids = [cell.id for cell in solved(lab).cells]
    assert len(ids) == len(set(ids)), "two cells with the same text have different ids"


def test_blank_lines_between_cells_change_nothing(lab: Path):
    """ruff puts two before a function, which must not change the lab."""
    before = nbformat.writes(solved(lab))
    (lab / "lab.py").write_text(LAB.replace("\n\n# %%", "\n\n\n# %%"))
    assert nbformat.writes(solved(lab)) == before


def test_cells_carry_what_nbgrader_wants(lab: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(EXERCISES, "99.half", Exercise("99.half", 3, lambda student: []))
    imports = "\n# %%\nimport torch\nfrom labkit.labs.lab_99 import checks as check\n"
    (lab / "lab.py").write_text(LAB + imports + "\n# %%\ncheck.half(half)\n")
    cells = solved(lab).cells
    plain = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3}
    for number, expected in (
        (-2, {"grade_id": "99-imports", "locked": True}),  # the cell with points is locked
        (1, {"grade_id": "99-half", "solution": True}),
        (-1, {"grade_id": "99-half-check", "grade": True, "locked": True, "points": 3}),
    ):
        assert cells[number].metadata.nbgrader == plain | expected
    assert "nbgrader" not in cells[4].metadata


@pytest.mark.slow
def test_a_build_writes_both_editions_and_then_has_nothing_to_do(
    lab: Path, capsys: pytest.CaptureFixture[str]
):
    assert [text.split(":")[1].strip() for text in out_of_step(lab)] == ["run `make notebooks`"] * 2
    editions.build(["99"])
    assert out_of_step(lab) == []
    assert "99_test: built, ran in" in capsys.readouterr().out
    editions.build([])
    assert "99_test: in sync" in capsys.readouterr().out
    outputs = [cell.get("outputs") for cell in nbformat.read(solved_path(lab), 4).cells]
    assert outputs[3][0].text == "the answer is 4\n" and outputs[4][0].data["text/plain"] == "4.0"


WIDGET_AND_BAR = (
    "import ipywidgets\nipywidgets.IntSlider()",
    "from time import sleep\nfrom labkit import progress\n"
    "for _ in progress(range(4)):\n    sleep(0.3)\nprint('on')",
)


@pytest.mark.slow
def test_a_widget_is_kept_as_its_picture_alone_and_a_bar_not_at_all() -> None:
    pytest.importorskip("ipywidgets", reason="makes the widget")
    notebook = nbformat.v4.new_notebook(metadata=editions.METADATA)
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in WIDGET_AND_BAR]
    (widget,), (bar,) = (cell.outputs for cell in editions.execute(notebook).cells)
    assert list(widget.data) == ["text/plain"]
    assert bar.text == "on\n"
    assert notebook.metadata.keys() == editions.METADATA.keys()


@pytest.mark.parametrize("edition", ["student", "solved"])
@pytest.mark.parametrize("change", ["source", "metadata", "id", "cells"])
def test_an_edition_that_was_edited_by_hand_is_found(lab: Path, edition: str, change: str):
    for make, path in [(student, student_path), (solved, solved_path)]:
        editions.write(make(lab), path(lab))
    assert out_of_step(lab) == []
    path = (student_path if edition == "student" else solved_path)(lab)
    notebook = nbformat.read(path, as_version=4)
    if change == "source":
        notebook.cells[0].source += " by hand"
    elif change == "metadata":
        notebook.cells[1].metadata["tags"] = ["mine"]
    elif change == "id":
        notebook.cells[1].id = "mine"
    else:
        notebook.cells.pop()
    nbformat.write(notebook, path)
    (problem,) = out_of_step(lab)
    assert path.name in problem and "run `make notebooks`" in problem
    assert ("solutions/" in problem) == (edition == "solved")


def test_outputs_do_not_put_an_edition_out_of_step(lab: Path):
    editions.write(student(lab), student_path(lab))
    notebook = solved(lab)
    notebook.cells[-1].outputs = [nbformat.v4.new_output("stream", text="at 12:31")]
    editions.write(notebook, solved_path(lab))
    assert out_of_step(lab) == []


def test_a_lab_that_is_not_there_is_refused(lab: Path):
    raises("no source for all of 42; there are 99_test", editions.build, ["42"])


@pytest.mark.parametrize(
    "text",
    [
        f"{BEGIN}\nx = 1",
        f"x = 1\n{END}",
        f"{BEGIN}\n{BEGIN}\nx = 1\n{END}",
        f"{BEGIN}\nx = 1\n{END}\n{END}",
        f"x = 1  {BEGIN}\n",
    ],
)
def test_markers_that_do_not_pair_are_refused(text: str):
    raises(BEGIN, without_solutions, text)


def test_the_report_on_an_incomplete_lab_names_what_is_missing(lab: Path):
    long = "\n# %%\n" + "\n".join(f"x{i} = {i}" for i in range(30))
    wordy = "\n\n# %% [markdown]\n# " + "word " * 200
    (lab / "lab.py").write_text(
        LAB.replace("# # Lab", "# Lab") + long + wordy + "\n\n# %%\ncheck.gone(half)\n"
    )
    text = "\n".join(form_problems(lab))
    for words in [
        "first cell is not a title", "has 30 lines", "has 200 words", "eight sections",
        "no glossary", "1 exercises: a lab has three", "check.gone is not declared", "0 headings",
    ]:  # fmt: skip
        assert words in text, words


def lines_of(code: Any) -> list[str]:
    """The lines of the file that the caption names."""
    caption = re.fullmatch(r"(labkit/.*), lines (\d+) to (\d+)", code.caption)
    file, first, last = caption.groups()
    return (ROOT / file).read_text().splitlines()[int(first) - 1 : int(last)]


def test_code_is_shown_from_the_library_as_it_is():
    code = show("comm/collectives/broadcast.py:tree_broadcast")
    assert code.text.startswith("def tree_broadcast(") and code.text.endswith("return sent_bytes")
    assert code.caption.startswith("labkit/comm/collectives/broadcast.py, lines ")
    assert lines_of(code) == code.text.splitlines()
    assert "<span" in code._repr_html_() and code.caption in repr(code)
    assert "lines 1 to " in show("comm/handle.py").caption, "a whole module"


def test_a_piece_of_a_method_is_shown_without_its_indent():
    code = show("runtime/world.py:World.close", since="self._closed", until="self._stop")
    lines = ['self._closed, self._stopped_by = True, "closed"', "with self._busy:"]
    assert code.text.splitlines() == lines == [line.strip() for line in lines_of(code)]
    assert code.caption.startswith("labkit/runtime/world.py, ")


@cases(
    ("comm/gone.py:f", "", "labkit has no file 'comm/gone.py'"),
    ("comm/collectives/broadcast.py:gone", "", "has no 'gone'"),
    ("comm/collectives/steps.py:run", "not there", "no line has 'not there'"),
)
def test_code_that_is_gone_is_an_error(place: str, words: str, says: str) -> None:
    raises(says, show, place, since=words)
