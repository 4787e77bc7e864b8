"""constraints.txt, pyproject.toml, environment.yml, the Makefile and the README agree. Making
.venv is tried with a Python that only pretends to install."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from command import python, run
from places import ROOT
from tables import raises

PYTHONS = ["3.11", "3.12", "3.13"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict:
    return tomllib.loads(read("pyproject.toml"))["project"]


def declared() -> list[Requirement]:
    """Every requirement of labkit[lab,dev,wild]."""
    extras = project()["optional-dependencies"].values()
    return [Requirement(line) for lines in (project()["dependencies"], *extras) for line in lines]


def pins(text: str) -> dict[str, Version]:
    """The pins of a constraints file; ValueError for a line that is not `name==version`."""
    found: dict[str, Version] = {}
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)", line)
        if match is None:
            raise ValueError(f"constraints.txt: {line!r} is not of the form name==version")
        name = canonicalize_name(match[1])
        if name in found:
            raise ValueError(f"constraints.txt: {name} is pinned twice")
        found[name] = Version(match[2])
    return found


def parted(requirements: list[Requirement], pinned: dict[str, Version]) -> list[str]:
    """One sentence for each declared requirement that the pins do not meet."""
    problems = []
    for requirement in requirements:
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None:
            problems.append(f"{requirement} is declared, constraints.txt has no pin for it")
        elif version not in requirement.specifier:
            problems.append(f"{requirement} is declared, constraints.txt pins {version}")
    return problems


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), flags=re.MULTILINE))


def test_every_declared_dependency_has_a_pin_inside_its_range():
    assert parted(declared(), pins(read("constraints.txt"))) == []


def test_a_missing_pin_and_a_pin_outside_the_range_are_found():
    wanted = [Requirement("alpha>=2"), Requirement("beta"), Requirement("Gam_ma<3")]
    problems = parted(wanted, pins("alpha==1.9\ngam-ma==2.0\n"))
    assert problems == [
        "alpha>=2 is declared, constraints.txt pins 1.9",
        "beta is declared, constraints.txt has no pin for it",
    ]


@pytest.mark.parametrize("line", ["alpha", "alpha>=1", "alpha==1.*", "alpha==1\nAlpha==2"])
def test_a_line_that_pins_nothing_is_refused(line: str):
    raises("constraints.txt", pins, line)


def test_torch_is_pinned_without_a_build():
    """`+cpu` or `+cu130` would tie everyone to one kind of machine."""
    assert str(pins(read("constraints.txt"))["torch"]) == "2.13.0"


def test_dependencies_are_ranges():
    for requirement in declared():
        operators = {part.operator for part in requirement.specifier}
        assert operators, f"{requirement.name} is declared without a range"
        assert not operators & {"==", "===", "~="}, f"{requirement}: pins belong in constraints.txt"


def test_packages_that_dependencies_bring_are_pinned_too():
    """Walks the installed packages of pinned versions, but for what torch brings for CUDA: torch
    pins that itself, to the build."""
    pinned = pins(read("constraints.txt"))
    to_visit = [canonicalize_name(requirement.name) for requirement in declared()]
    visited: set[str] = set()
    missing: set[str] = set()
    while to_visit:
        name = to_visit.pop()
        if name in visited:
            continue
        visited.add(name)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in pinned or Version(package.version).public != pinned[name].public:
            continue
        for needed in map(Requirement, package.requires or []):
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            if name == "torch" and re.match(r"nvidia|cuda|triton|pytorch-triton", needed.name):
                continue
            to_visit.append(canonicalize_name(needed.name))
            if to_visit[-1] not in pinned:
                missing.add(f"{needed.name} (needed by {name})")
    assert sorted(missing) == []


def test_the_python_range_is_the_same_everywhere():
    wanted = project()["requires-python"]
    assert wanted == ">=3.11,<3.14"
    classified = re.findall(r"Python :: (3\.\d+)$", "\n".join(project()["classifiers"]), re.M)
    assert classified == PYTHONS

    make = read("Makefile")
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in make
    assert [version for version in PYTHONS if f"python{version} " not in make] == []

    settings = tomllib.loads(read("pyproject.toml"))["tool"]
    assert settings["ruff"]["target-version"] == "py311"
    assert settings["mypy"]["python_version"] == "3.11"

    assert "3.11 to 3.13" in read("README.md")


def test_make_and_conda_install_the_same_packages():
    assert "-c constraints.txt -e '.[lab,dev,wild]'" in read("Makefile")
    lines = read("environment.yml").partition("\ndependencies:\n")[2].splitlines()
    conda = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
    pip = [line.removeprefix("      - ").strip('"') for line in lines if line.startswith(" " * 6)]
    assert len(conda) + len(pip) == len(lines), "environment.yml has lines of another kind"
    assert conda.pop() == "pip:" and pip == ["-c constraints.txt", "-e .[lab,dev,wild]"], (
        "environment.yml must install labkit[lab,dev,wild] under constraints.txt, and nothing "
        "else, so that the conda way gives the packages of `make setup`"
    )
    names = [re.split(r"[=<> ]", entry)[0] for entry in conda]
    assert names == ["python", "pip"], (
        "environment.yml takes Python and pip from conda and every package from constraints.txt"
    )
    assert conda[0].removeprefix("python=") in PYTHONS


def test_the_version_has_one_source():
    assert "version" in project()["dynamic"] and "version" not in project()
    source = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["version"]["path"]
    found = re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', read(source), flags=re.MULTILINE)
    assert len(found) == 1, f'{source} needs exactly one line: __version__ = "x.y.z"'


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_make_command_of_a_page_exists(page: str):
    blocks = re.findall(r"^```\w*\n(.*?)^```", read(page), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", read(page))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", "\n".join(blocks + spans)))
    assert named, f"{page} names no make command"
    assert named <= targets(), f"{page} names targets the Makefile lacks: {named - targets()}"


@pytest.mark.parametrize("page", ["README.md", "notebooks/README.md", "notebooks/GLOSSARY.md"])
def test_every_link_of_a_page_exists(page: str):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(page))
    assert links and not [x for x in links if not ((ROOT / page).parent / x).exists()]


def test_every_target_has_its_sentence():
    described = set(re.findall(r"^([a-z][a-z-]*):[^#\n]*## \S", read("Makefile"), flags=re.M))
    assert described == targets()
    (phony,) = re.findall(r"^\.PHONY: ([a-z -]+)$", read("Makefile"), flags=re.MULTILINE)
    assert set(phony.split()) == targets()


def test_ci_runs_lint_types_and_every_test():
    script = read(".ci/run")
    assert script.startswith("#!/usr/bin/env bash")
    assert "set -euo pipefail" in script
    assert os.access(ROOT / ".ci/run", os.X_OK)
    steps = re.findall(r"^step ([a-z-]+)", script, flags=re.MULTILINE)
    assert {"lint", "types", "test"} <= set(steps) <= targets()


def test_the_timeout_needs_no_plugin():
    """`make test-here` runs where pytest-timeout and nbval are missing."""
    settings = tomllib.loads(read("pyproject.toml"))["tool"]["pytest"]["ini_options"]
    assert settings["timeout"] == 120
    assert not re.search(r"timeout|nbval|-n\b|xdist", settings["addopts"])


@pytest.mark.slow
def test_pytest_starts_without_the_timeout_plugin(tmp_path: Path):
    (tmp_path / "tests" / "support").mkdir(parents=True)
    for file in ("pyproject.toml", "tests/conftest.py", "tests/support/worlds.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "tests/test_it.py").write_text(
        "import pytest\n\n@pytest.mark.timeout(5)\ndef test_it():\n    pass\n"
    )
    done = python("-m", "pytest", "-q", "-p", "no:timeout", cwd=tmp_path)
    assert "warning" not in done.stdout + done.stderr


FAKE_PYTHON = """#!/bin/sh
# Answers version questions like the real one, makes a .venv of one script, installs nothing.
case "$1 $2" in
    "-c import ensurepip"*) exit "${NO_ENSUREPIP:-0}" ;;
    "-c "*) exec REAL "$@" ;;
    "-m venv")
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/labkit"
        echo venv >> LOG ;;
    "-m pip") echo "$*" >> LOG; exit "${PIP_FAILS:-0}" ;;
    *) echo "ran $*" >> LOG ;;
esac
"""


TARGETS_IN_VENV = {"demo", "lab", "notebooks", "test", "check", "lint", "types", "format", "hooks"}


class Workplace:
    """A copy of the set-up in an empty folder, whose Python writes down what it is asked to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        self.log = folder / "log"
        self.python = folder / "fakepython"
        self.python.write_text(
            FAKE_PYTHON.replace("REAL", sys.executable).replace("LOG", str(self.log))
        )
        self.python.chmod(0o755)

    def make(
        self, *arguments: str, status: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A finished make, which must end with this status."""
        # MAKEFLAGS and its like would tie this make to the one that runs the suite.
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        self.log.write_text("")
        command = ("make", f"PYTHON={self.python}", *arguments)
        env = kept | {"PYTHONPATH": ""} | variables
        return run(*command, status=status, cwd=self.folder, env=env, timeout=60)

    def edit(self, name: str, old: str, new: str) -> None:
        file = self.folder / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    def asked(self) -> list[str]:
        return [line.split()[0] for line in self.log.read_text().splitlines()]


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    return Workplace(tmp_path)


def test_setup_is_made_once(workplace: Workplace):
    workplace.make("setup")
    assert workplace.asked() == ["venv", "-m"]
    assert "-c constraints.txt -e .[lab,dev,wild]" in workplace.log.read_text()
    workplace.make("setup")
    assert workplace.asked() == []


@pytest.mark.parametrize("target", sorted(TARGETS_IN_VENV))
def test_each_target_sets_up_first(workplace: Workplace, target: str):
    workplace.make(target)
    assert workplace.asked()[:2] == ["venv", "-m"] and workplace.asked()[2:] != []


def test_no_target_is_left_out_above():
    assert targets() == TARGETS_IN_VENV | {"help", "setup", "clean", "test-here", "gpu"}


def change_the_pins(workplace: Workplace) -> None:
    workplace.edit("constraints.txt", "\ntorch==", "\nanother==1.0\ntorch==")


def add_a_dependency(workplace: Workplace) -> None:
    workplace.edit("pyproject.toml", '"torch>=2.11"', '"torch>=2.12"')


def lose_the_python(workplace: Workplace) -> None:
    (workplace.folder / ".venv/bin/python").unlink()


def fail_half_way(workplace: Workplace) -> None:
    shutil.rmtree(workplace.folder / ".venv")
    workplace.make("setup", status=2, PIP_FAILS="1")


def move(workplace: Workplace) -> None:
    workplace.folder = workplace.folder.rename(workplace.folder.parent / "moved")
    workplace.python, workplace.log = workplace.folder / "fakepython", workplace.folder / "log"
    text = workplace.python.read_text()
    workplace.python.write_text(re.sub(r">> \S+", f">> {workplace.log}", text))


@pytest.mark.parametrize(
    ("change", "says"),
    [(change_the_pins, "changed"), (add_a_dependency, "changed"), (fail_half_way, "half made"),
     (lose_the_python, ""), (move, "")],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_setup_is_made_anew_after(workplace: Workplace, change: Any, says: str) -> None:
    workplace.make("setup")
    left_over = workplace.folder / ".venv/left_over"
    left_over.touch()
    change(workplace)
    left_over = workplace.folder / ".venv/left_over"
    assert says in workplace.make("setup").stdout
    assert workplace.asked() == ["venv", "-m"] and not left_over.exists()


def test_setup_is_not_made_anew_for_a_lint_rule(workplace: Workplace) -> None:
    workplace.make("setup")
    workplace.edit("pyproject.toml", "line-length = 100", "line-length = 99")
    workplace.make("setup")
    assert workplace.asked() == []


def test_no_python_that_suits_is_an_error_that_helps(workplace: Workplace):
    done = workplace.make("PYTHON=no-such-python", "setup", status=2)
    assert "needs Python 3.11, 3.12 or 3.13" in done.stderr
    assert "make setup PYTHON=" in done.stderr
    assert not (workplace.folder / ".venv").exists()
    done = workplace.make("setup", status=2, NO_ENSUREPIP="1")
    assert "cannot make virtual environments" in done.stderr


def test_help_lists_every_target(workplace: Workplace):
    listed = re.findall(r"^  make (\S+)", workplace.make().stdout, flags=re.MULTILINE)
    assert set(listed) == targets() and workplace.asked() == []


def test_test_here_installs_nothing(workplace: Workplace):
    workplace.make("test-here", "ARGS=-k nothing")
    assert not (workplace.folder / ".venv").exists()
    assert workplace.log.read_text() == "ran -m pytest -k nothing\n"
