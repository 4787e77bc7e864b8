"""The labs work from a checkout and from a wheel, with the notebook in another folder."""

import os
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

from command import run
from places import ROOT

pytest.importorskip("jupytext", reason="the labs are built with jupytext")
pytest.importorskip("nbclient", reason="the labs are run by nbclient")

import nbformat
from nbclient import NotebookClient

from editions import METADATA, checked, labs, solved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXERCISE = "average_in_buckets"  # of lab 05: its check runs scenarios on 2, 3 and 4 ranks
LISTING = """
from importlib import import_module
import labkit
from labkit.course import EXERCISES
from labkit.labs import FOLDERS
for number in FOLDERS:
    import_module(f"labkit.labs.lab_{number}.checks")
print(labkit.__file__, *EXERCISES)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    done = run(*command, status=None, timeout=300)
    if done.returncode and "hatchling" in done.stderr:
        pytest.skip("the build backend cannot be fetched here")
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(params=["checkout", "wheel"])
def installed(request: pytest.FixtureRequest) -> Path:
    """The folder on Python's path."""
    return ROOT if request.param == "checkout" else request.getfixturevalue("wheel")


def environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed)}


def test_the_same_exercises_are_there(wheel: Path, tmp_path: Path) -> None:
    listing = partial(run, sys.executable, "-c", LISTING, cwd=tmp_path, timeout=60)
    listings = [listing(env=environment(folder)).stdout.split() for folder in (ROOT, wheel)]
    files = [str(folder / "labkit/__init__.py") for folder in (ROOT, wheel)]
    assert [listing[0] for listing in listings] == files
    assert listings[0][1:] == listings[1][1:] and "05.average_in_buckets" in listings[0]


def test_a_copied_notebook_passes_its_check_on_ranks(installed: Path, tmp_path: Path) -> None:
    (lab,) = (lab for lab in labs() if lab.name.startswith("05"))
    cells = [cell for cell in solved(lab).cells if cell.cell_type == "code"]
    place = next(i for i, cell in enumerate(cells) if checked(cell.source) == EXERCISE)
    notebook = nbformat.v4.new_notebook(
        metadata=METADATA, cells=[cells[0], *cells[place - 1 : place + 1]]
    )
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment(installed))
    (output,) = notebook.cells[-1].outputs
    assert output.data["text/plain"].startswith("✓ 05.average_in_buckets passed")


def test_a_wheel_holds_no_solution(wheel: Path) -> None:
    files = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    sources = {name for name in files if name.startswith("labkit/labs/src/")}
    assert {name.split("/")[3] for name in sources} == {lab.name for lab in labs()}
    for lab in labs():
        assert f"labkit/labs/{lab.name}.ipynb" in files
        assert f"labkit/labs/src/{lab.name}/checks.py" in files
    assert any(name.startswith("labkit/labs/results/precision-") for name in files)
    left_out = ("lab.py", "wrong_answers.py", "src/editions.py", "src/as_script.py")
    assert not [x for x in files if "solutions" in x or x.endswith(left_out)]
