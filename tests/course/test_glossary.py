"""The glossary: built from those of the labs, with one definition per term."""

from pathlib import Path

import pytest

from tables import raises

pytest.importorskip("jupytext", reason="the labs are built with jupytext")

import editions

LAB = "# ### Glossary\n#\n# | English | 中文 | definition |\n{}\n# %%\n# | no | term | here |\n"


def test_the_glossary_is_in_step_with_the_labs() -> None:
    path = editions.glossary_path()
    assert path.read_text(encoding="utf-8") == editions.glossary(), "run `make notebooks`"
    links = "](../GLOSSARY.md)", "](GLOSSARY.md)"
    for lab in editions.labs():
        for edition, link in zip((editions.solved(lab), editions.student(lab)), links):
            assert sum(link in cell.source for cell in edition.cells) == 1, lab.name


def test_terms_are_sorted_name_their_labs_and_have_one_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(editions, "NOTEBOOKS", tmp_path)
    rank, world = "rank | 秩 | an index", "World size | 进程总数 | a number"
    for name, rows in {"00_a": (world, rank), "01_b": (rank,)}.items():
        (tmp_path / "src" / name).mkdir(parents=True)
        table = "\n".join(f"# | {row} |" for row in rows)
        (tmp_path / "src" / name / "lab.py").write_text(LAB.format(table), "utf-8")
    assert editions.glossary().splitlines()[-2:] == [
        f"| {rank} | [00](00_a.ipynb), [01](01_b.ipynb) |", f"| {world} | [00](00_a.ipynb) |",
    ]  # fmt: skip
    table = "# | rank | 秩 | a process |"
    (tmp_path / "src" / "01_b" / "lab.py").write_text(LAB.format(table), "utf-8")
    raises("01_b defines 'rank' unlike lab 00_a", editions.glossary)
