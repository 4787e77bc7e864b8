"""Labs in JupyterLab, in a chromium or Google Chrome: they run, sliders work, a hang is stopped.
With LABKIT_SCREENSHOTS=some/folder, that folder keeps a picture of every screen of every lab."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from chromium import HEIGHT, WIDTH, browser_page, missing, photograph
from command import python
from lab_page import Cell, JupyterLab, LabPage, jupyterlab, notebook
from places import SUPPORT
from provoke import ROOT, gone

if TYPE_CHECKING:
    from playwright.sync_api import ElementHandle, Page

jupytext = pytest.importorskip("jupytext", reason="needs jupytext, to build the sample lab")
pytest.importorskip("jupyterlab", reason="needs JupyterLab")
pytest.importorskip("ipywidgets", reason="needs ipywidgets, for sliders")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

SAMPLES = ("sample_lab.py", "hanging_lab.py")
# The first lab, and labs with widgets that the sample does not have: nbval runs everything else
# without a browser (tests/course/test_notebooks.py).
WIDGETS = ("plot.steps(", "plot.view(", "what_if(", "plot.flip_bits(", "plot.plan_view(")
SAMPLE = (SUPPORT / SAMPLES[0]).read_text(encoding="utf-8")
LABS = [
    lab
    for lab in sorted((ROOT / "notebooks/solutions").glob("*.ipynb"))
    if lab.name.startswith("00")
    or any(word in lab.read_text(encoding="utf-8") and word not in SAMPLE for word in WIDGETS)
]
LAB_WITHIN_S = 240.0  # a lab takes 25 s on two idle cores


def write_notebooks(root: Path) -> None:
    """The samples and the real labs, with no cell run yet."""
    root.mkdir()
    for name in SAMPLES:
        source = jupytext.read(SUPPORT / name, fmt="py:percent")
        jupytext.write(source, root / name.replace(".py", ".ipynb"))
    for lab in LABS:
        content = json.loads(lab.read_text(encoding="utf-8"))
        for cell in content["cells"]:
            if cell["cell_type"] == "code":
                cell.update(outputs=[], execution_count=None)
        content["metadata"].pop("widgets", None)
        (root / lab.name).write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterLab]:
    folder = tmp_path_factory.mktemp("jupyterlab")
    write_notebooks(folder / "notebooks")
    with jupyterlab(folder, folder / "notebooks") as running:
        yield running
    assert running.left == [], "these processes outlived the server"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    return Path(os.environ.get("LABKIT_SCREENSHOTS") or folder).resolve()


def all_ran(cells: list[Cell]) -> bool:
    return all(cell.count is not None and not cell.running for cell in cells)


def all_ran_or_one_failed(cells: list[Cell]) -> bool:
    return all_ran(cells) or any(cell.failed for cell in cells)


def keep_pictures(opened: LabPage, folder: Path) -> None:
    """Keep a picture of every screen in both themes, if LABKIT_SCREENSHOTS is set."""
    if "LABKIT_SCREENSHOTS" in os.environ:
        opened.show_whole()
        for theme, file in (("Light", folder), ("Dark", folder / "dark")):
            opened.theme(f"JupyterLab {theme}")
            photograph(opened.page, file / Path(opened.name).with_suffix(".png"), cut=HEIGHT)
        opened.theme("JupyterLab Light")


# The sliders with a picture in the same output.
SLIDERS = ".jp-CodeCell:has(.jp-Cell-outputArea img) .noUi-handle"
# A digest of the picture in a slider's output, once it differs from `before`.
PICTURE = """async ([slider, before]) => {
    const picture = slider.closest(".jp-CodeCell").querySelector(".jp-Cell-outputArea img");
    if (!picture?.complete || !picture.naturalWidth) return null;  // it is being changed
    const bytes = await (await fetch(picture.src)).arrayBuffer();
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)).join(" ");
    return digest === before ? null : digest;
}"""


def move_slider(page: "Page", slider: "ElementHandle") -> None:
    """Move a slider with a key, and wait until its picture changes."""
    before = page.wait_for_function(PICTURE, arg=[slider, ""]).json_value()
    value = slider.get_attribute("aria-valuenow")
    slider.click()
    page.keyboard.press("ArrowRight")
    if slider.get_attribute("aria-valuenow") == value:  # it was at its end
        page.keyboard.press("ArrowLeft")
    page.wait_for_function(PICTURE, arg=[slider, before])


@pytest.mark.parametrize("name", ["sample_lab.ipynb", *(lab.name for lab in LABS)])
def test_a_lab_runs_from_top_to_bottom_and_its_sliders_change_its_pictures(
    lab: JupyterLab, pictures: Path, name: str
):
    with notebook(lab, name, pictures) as opened:
        assert not any(cell.count or cell.outputs for cell in opened.cells())
        opened.run_all()
        cells = opened.wait_for(all_ran_or_one_failed, "every cell ran", LAB_WITHIN_S)
        assert [cell.source + "\n" + cell.text for cell in cells if cell.failed] == []
        sliders = opened.page.query_selector_all(SLIDERS)
        for slider in sliders:
            move_slider(opened.page, slider)
        if name == "sample_lab.ipynb":
            assert len(sliders) == 2 + 1 + 3 + 5 + 1, "the sample's, then the labs'"
            opened.page.click(".widget-toggle-button")  # the sign bit
            opened.page.get_by_text("toward zero: -").wait_for()
            assert [cell.error for cell in cells if cell.error] == ["RankError"]
            text = "\n".join(cell.text for cell in cells)
            assert "[10.5, 10.5]" in text and "rank 1: [2.0, 2.0, 2.0]" in text
        keep_pictures(opened, pictures)


def test_the_stop_button_ends_a_hang_and_the_next_cell_runs(lab: JupyterLab, pictures: Path):
    with notebook(lab, "hanging_lab.ipynb", pictures) as opened:
        opened.run_all()
        opened.wait_for(lambda cells: "rank 1 waits" in cells[1].text, "it hangs")
        opened.tool("notebook:interrupt-kernel")
        stopped = opened.wait_for(lambda cells: not cells[1].running, "the hang ended")
        assert stopped[1].error == "RankInterrupt"
        assert "the 2 ranks were stopped, and the next run starts new ranks" in stopped[1].text
        assert stopped[2].count is None, "a cell after the stopped cell has run"

        opened.select(2)
        opened.tool("notebook:run-cell-and-select-next")
        cells = opened.wait_for(lambda cells: all_ran(cells[2:]), "the next cell ran")
        assert cells[2].text == "[0, 10]"
        keep_pictures(opened, pictures)


def test_a_notebook_is_photographed_to_its_end(tmp_path: Path):
    write_notebooks(tmp_path / "notebooks")
    out = tmp_path / "lab.png"
    sample = tmp_path / "notebooks/sample_lab.ipynb"
    python(SUPPORT / "browser.py", sample, out, "--dark", timeout=120)
    width, height = struct.unpack(">II", out.read_bytes()[16:24])  # of PNG's first chunk
    assert width == WIDTH and height > HEIGHT


def test_nothing_is_left_of_server_kernel_ranks_and_browser(pictures: Path, tmp_path: Path):
    """Even if the ranks hang and no interrupt stops them."""
    write_notebooks(tmp_path / "notebooks")
    before = family(os.getpid())
    with (
        browser_page(pictures) as page,
        jupyterlab(tmp_path / "jupyterlab", tmp_path / "notebooks") as lab,
    ):
        opened = LabPage(lab, page, "hanging_lab.ipynb")
        opened.run_all()
        opened.wait_for(lambda cells: "rank 1 waits" in cells[1].text, "it hangs")
        labs = family(lab.process.pid)
        browsers = family(os.getpid()) - before - labs
        assert len(browsers) > 2, "a chromium is several processes"
        assert len(labs) >= 5, "the server, its kernel, the kernel's warm server, two ranks"
    assert lab.left == [], "these had to be killed"
    assert gone([*browsers, *labs])


def family(pid: int) -> set[int]:
    return {pid} | {child.pid for child in psutil.Process(pid).children(recursive=True)}
