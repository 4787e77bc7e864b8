"""The glossary: made from the labs' own, in which each term has one definition."""

from pathlib import Path

import pytest

from tables import raises

pytest.importorskip("jupytext", reason="the labs are built with jupytext")

import editions

HEAD = "# %% [markdown]\n# ### Glossary\n#\n# | English | 中文 | definition |\n# |---|---|---|\n"


def write_labs(folder: Path, **rows: list[str]) -> None:
    for name, terms in rows.items():
        lab = folder / "src" / f"{name[1:]}_topic" / "lab.py"
        lab.parent.mkdir(parents=True)
        table = "".join(f"# | {row} |\n" for row in terms)
        lab.write_text(f"{HEAD}{table}\n# %% [markdown]\n# | no | term | here |\n", "utf-8")


def test_the_glossary_is_in_step_with_the_labs() -> None:
    path = editions.glossary_path()
    assert path.read_text(encoding="utf-8") == editions.glossary(), "run `make notebooks`"
    links = "](../GLOSSARY.md)", "](GLOSSARY.md)"
    for lab in editions.labs():
        for edition, link in zip((editions.solved(lab), editions.student(lab)), links):
            assert sum(link in cell.source for cell in edition.cells) == 1, lab.name


def test_terms_are_sorted_and_name_their_labs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(editions, "NOTEBOOKS", tmp_path)
    rank, world = "rank | 秩 | an index", "World size | 进程总数 | a number"
    write_labs(tmp_path, _00=[world, rank], _01=[rank])
    *_, first, second = editions.glossary().splitlines()
    assert first == f"| {rank} | [00](00_topic.ipynb), [01](01_topic.ipynb) |"
    assert second == f"| {world} | [00](00_topic.ipynb) |"


def test_a_term_with_two_definitions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(editions, "NOTEBOOKS", tmp_path)
    write_labs(tmp_path, _00=["rank | 秩 | an index"], _01=["rank | 秩 | a process"])
    raises("01_topic defines 'rank' unlike lab 00_topic", editions.glossary)
