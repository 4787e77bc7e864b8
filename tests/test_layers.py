"""Imports run downward only (CONTRIBUTING.md, "Architecture"): each import in the AST counts,
one in a function, behind `if TYPE_CHECKING:` or by `import_module("labkit.plot")` too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import python
from places import ROOT

PACKAGE = ROOT / "labkit"

# The one list of who stands where: a new top-level module or folder of labkit is added here.
LAYERS: dict[int, set[str]] = {
    1: {"schedules", "events", "foreign", "trace", "clusters"},
    2: {"comm", "dispatch", "runtime.board", "runtime.clock", "runtime.dispatcher"}
    | {"runtime.launchers", "runtime.output", "runtime.process_context", "runtime.transports"},
    3: {"holdings", "parallel", "precision", "memory", "models", "data"},
    4: {"trace.recording", "runtime", "checkpoints"},
    5: {"replaying", "plot", "predict", "bench", "sweeps", "course", "labs", "recipes", "training"}
    | {"cli", "compare", "doctor", "view", "lazy"},
}

# What moves bytes: the textbook in `comm`, what carries them out in these parts of `runtime`.
MESSAGING = LAYERS[2]

# Inside a layer the units stand side by side and do not know each other, with these exceptions.
# Strategies use mixed precision and recomputation; no strategy knows a model or a data set.
# A world switches the recording of its ranks on. Faces may use one another, but the command
# line is the last: nothing stands on it.
SIBLINGS: dict[str, set[str]] = {
    "trace": {"events", "foreign"},
    "clusters": {"foreign"},
    **{unit: MESSAGING - {unit} for unit in MESSAGING},
    "parallel": {"precision", "memory", "holdings"},
    "precision": {"holdings"},
    "runtime": {"trace.recording"},
    "checkpoints": {"runtime"},  # its progress bar, and `attach` for a model without a strategy
    **{face: LAYERS[5] - {face, "cli"} for face in LAYERS[5]},
    "plot": LAYERS[5] - {"plot", "cli", "bench"},  # it draws data, and measures nothing
    "sweeps": {"lazy"},  # data and its fit
}

NO_TORCH = LAYERS[1]  # run where torch is not installed, and import in no time
DISTRIBUTED = {*MESSAGING, "runtime"}  # the door, and what starts ranks
TORCH_DISTRIBUTED = ("torch.distributed", "torch._C._distributed_c10d")
PEERS = "labkit/bench/peers.py"  # torch's own strategies, to be timed beside ours
LABS = "notebooks/src/*/*.py"
NO_CHECKS = {"lab.py", "wrong_answers.py"}  # a student's code may import what it likes
FILE_FORMAT = "torch.distributed.checkpoint"  # moves no byte between ranks if one does not let it

# `labkit/__init__.py` hands out the public names lazily and `labkit/__main__.py` starts the
# command line: both may import anything, as a face may.
ROOT_UNITS = {"__init__", "__main__"}
LAYER_OF = {unit: layer for layer, units in LAYERS.items() for unit in units}
LAYER_OF |= {unit: 5 for unit in ROOT_UNITS}


def module_name(path: Path, package: Path) -> str:
    if not path.is_relative_to(package):  # of a lab, which labkit.labs gives a name
        return f"labkit.labs.lab_{path.parent.name[:2]}.{path.stem}"
    parts = list(path.relative_to(package.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """The part of labkit that a module belongs to: `comm` for `labkit.comm.mesh`, and
    `runtime.board` for `labkit.runtime.board`, as the table has it."""
    parts = module.split(".")[1:]
    return next(
        (".".join(parts[:n]) for n in (2, 1) if ".".join(parts[:n]) in LAYER_OF),
        parts[0] if parts else "__init__",
    )


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module that `from X import ...` names, with the dots of a relative import resolved."""
    if node.level == 0:
        return node.module or ""
    base = module.split(".")
    base = base[: len(base) - node.level + (1 if is_package else 0)]
    return ".".join([*base, node.module] if node.module else base)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """Each dotted name that the module may import, and its line; `from a import b` gives `a.b`."""
    torch_names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
                if alias.name == "torch" and alias.asname:
                    torch_names.add(alias.asname)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, module, is_package)
            for alias in node.names:
                yield f"{source}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            name = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(name, ast.Constant):
                yield str(name.value), node.lineno
    for node in ast.walk(tree):  # `import torch`, then torch.distributed.send(...)
        match node:
            case ast.Attribute(ast.Name(name), "distributed") if name in torch_names:
                yield "torch.distributed", node.lineno


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def broken_rule(unit: str, name: str) -> str | None:
    """Why `unit` may not import `name`; None if it may."""
    if within(name, "torch") and unit in NO_TORCH:
        return f"layer 1 ({', '.join(sorted(NO_TORCH))}) does without torch"
    writes_files = unit == "checkpoints" and within(name, FILE_FORMAT)
    if within(name, *TORCH_DISTRIBUTED) and unit not in DISTRIBUTED and not writes_files:
        return (
            "only labkit.comm (the door) and labkit.runtime (which starts ranks) import "
            "torch.distributed; go through labkit.comm"
        )
    target = unit_of(name)
    allowed = name == "labkit.__version__" or unit in ROOT_UNITS or target == unit
    if allowed or not within(name, "labkit"):
        return None
    here, there = LAYER_OF[unit], LAYER_OF.get(target)
    if there is None or target in ROOT_UNITS:
        if here == 5:
            return None
        return (
            "a public name taken from labkit itself hides which layer it comes from; "
            "import it from its module"
        )
    if there > here:
        return f"imports run downward only: {unit} is of layer {here}, {target} of layer {there}"
    if there == here and target not in SIBLINGS.get(unit, set()):
        return (
            f"{unit} and {target} stand side by side in layer {here}; move what both need "
            "to a lower layer, or allow it in SIBLINGS (tests/test_layers.py) and say why"
        )
    return None


def problems(package: Path) -> list[str]:
    """One sentence for each broken rule in the tree under `package` (a folder named labkit), and
    in the checks of the labs beside it."""
    sentences: list[str] = []
    checks = [path for path in package.parent.glob(LABS) if path.name not in NO_CHECKS]
    for path in sorted([*package.rglob("*.py"), *checks]):
        module = module_name(path, package)
        unit = path.stem if path.parent == package else unit_of(module)
        if unit not in LAYER_OF:
            sentences.append(
                f"labkit.{unit} is in no layer: add {unit!r} to LAYERS in tests/test_layers.py "
                "and to the table in CONTRIBUTING.md"
            )
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        where = path.relative_to(package.parent)
        for name, line in imports(tree, module, path.name == "__init__.py"):
            if where.as_posix() == PEERS and within(name, "torch.distributed"):
                continue
            if reason := broken_rule(unit, name):
                sentences.append(f"{where}:{line} imports {name}: {reason}")
    return list(dict.fromkeys(sentences))  # without doubles


def tree(folder: Path, **files: str) -> Path:
    """A package named labkit, with `comm__mesh="..."` as labkit/comm/mesh.py, and `lab_checks` as
    those of a lab."""
    package = folder / "labkit"
    for name, text in files.items():
        path = package / (name.replace("__", "/") + ".py" if name != "init" else "__init__.py")
        if name == "lab_checks":
            path = folder / "notebooks/src/05_ddp/checks.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


GOOD = {
    "init": "def __getattr__(name):\n    importlib.import_module('labkit.runtime.world')",
    "events": "import json\nfrom labkit import __version__",
    "comm__mesh": "import torch.distributed\nfrom labkit.events import Event\nfrom . import ring",
    "comm__ring": "from ..events import Event",
    "parallel__ddp": "import torch\nfrom labkit.comm import Comm\nfrom labkit.precision import x",
    "precision": "import torch",
    "runtime__ranks": "import torch.distributed\nimport labkit.trace.recording, labkit.comm",
    "trace__recording__spans": "from labkit.events import Event",
    "checkpoints": "from torch.distributed.checkpoint import FileSystemWriter",
    "compare": "from labkit import World\nfrom labkit.course import equal\nimport labkit.parallel",
    "course": "import torch",
    "lab_checks": "from labkit.course import run\nfrom .scenarios import x\nimport labkit.comm",
    "bench__peers": "from torch.distributed.fsdp import fully_shard",
    "cli": "def main():\n    from labkit import compare",
}


def test_a_tree_that_keeps_the_rules_has_no_problems(tmp_path: Path):
    assert problems(tree(tmp_path, **GOOD)) == []


BROKEN = {
    "downward only": [  # upward, also out of sight
        ("comm__mesh", "from labkit.runtime.world import World"),
        ("comm__mesh", "import labkit.parallel.ddp.ddp"),
        ("parallel__ddp", "import labkit.trace.recording"),
        ("parallel__zero", "from ..plot import timeline"),
        ("parallel__zero", "from .. import plot"),
        ("runtime__ranks", "from labkit.cli import main"),
        ("events", "import labkit.comm"),
        ("parallel__ddp", "def f():\n    from labkit.trace.recording import Span"),
        ("comm__mesh", "if TYPE_CHECKING:\n    from labkit.runtime.world import World"),
        ("trace__recording__spans", "importlib.import_module('labkit.plot')"),
        ("trace__recording__spans", "__import__('labkit.plot')"),
        ("trace__recording__spans", "try:\n    import labkit.bench\nexcept ImportError:\n    pass"),
    ],
    "hides which layer": [  # through the lazy names of labkit itself
        ("parallel__ddp", "from labkit import World"),
        ("comm__mesh", "import labkit"),
        ("trace__recording__spans", "from ... import World"),
    ],
    "side by side": [  # sideways
        ("parallel__ddp", "from labkit.models import GPT"),
        ("parallel__ddp", "from labkit.data import text"),
        ("models__gpt", "from labkit.parallel import DDP"),
        ("data", "from labkit.models import GPT"),
        ("precision", "from labkit.parallel import DDP"),
        ("trace__recording__spans", "from labkit.runtime.world import World"),
        ("schedules", "from labkit.events import Event"),
        ("doctor", "from labkit.cli import main"),
        ("plot__bandwidths", "from labkit.bench.harness import read"),
        ("sweeps__sweep", "from labkit.bench import harness"),
    ],
    "does without torch": [  # torch in layer 1
        ("schedules", "import torch"),
        ("clusters", "def f():\n    from torch import nn"),
        ("events", "import torch.fx as fx"),
    ],
    "only labkit.comm": [  # torch.distributed away from the door
        ("parallel__ddp", "import torch.distributed as dist"),
        ("parallel__ddp", "from torch import distributed"),
        ("parallel__ddp", "from torch.distributed.nn import functional"),
        ("models__gpt", "import torch\ntorch.distributed.barrier()"),
        ("models__gpt", "import torch as t\nt.distributed.barrier()"),
        ("bench", "def f():\n    import torch.distributed"),
        ("bench__ddp", "import torch.distributed"),
        ("lab_checks", "import torch.distributed"),
        ("parallel__peers", "import torch.distributed"),
        ("trace__recording__spans", "from torch._C._distributed_c10d import Store"),
        ("checkpoints", "from torch.distributed import all_reduce"),
        ("trace__recording__spans", "from torch.distributed.checkpoint import Metadata"),
    ],
    "labkit.helpers is in no layer: add 'helpers' to LAYERS": [("helpers", "")],
    "labkit.utils is in no layer: add 'utils' to LAYERS": [("utils__tools", "")],
}


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [(*row, expected) for expected, rows in BROKEN.items() for row in rows],
)
def test_a_broken_rule_is_reported_once(tmp_path: Path, file: str, text: str, expected: str):
    (problem,) = problems(tree(tmp_path, **{**GOOD, file: text}))
    assert expected in problem


def test_a_problem_names_the_file_and_the_line(tmp_path: Path):
    package = tree(tmp_path, **{**GOOD, "comm__mesh": "import os\n\nimport labkit.cli"})
    (problem,) = problems(package)
    assert problem.startswith("labkit/comm/mesh.py:3 imports labkit.cli: ")


def test_every_unit_stands_in_one_layer():
    units = [unit for layer in LAYERS.values() for unit in layer]
    assert len(units) == len(set(units))
    for unit, allowed in SIBLINGS.items():
        assert {LAYER_OF[other] for other in allowed} == {LAYER_OF[unit]}


def test_labkit_imports_downward_only():
    broken = problems(PACKAGE)
    assert broken == [], "\n".join(["", *broken])


def test_the_table_in_contributing_lists_every_unit():
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for layer, units in LAYERS.items():
        rows = [line for line in page.splitlines() if line.startswith(f"| {layer} |")]
        assert len(rows) == 1, f"CONTRIBUTING.md needs one row for layer {layer}"
        missing = {unit for unit in units if f"`{unit}`" not in rows[0]}
        assert not missing, f"CONTRIBUTING.md, layer {layer}, lacks {sorted(missing)}"


def loaded_after(statement: str) -> set[str]:
    """The top-level modules that a fresh Python holds after a statement."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(python("-c", code).stdout.split())


def test_importing_labkit_loads_nothing_heavy():
    """What keeps `import labkit` under 50 ms; a time is not asserted anywhere."""
    heavy = {"torch", "numpy", "matplotlib", "IPython", "rich", "typer", "cloudpickle", "psutil"}
    assert loaded_after("import labkit") & heavy == set()


@pytest.mark.parametrize("unit", sorted({*NO_TORCH, "trace.nccl_log"}))
def test_layer_1_runs_without_torch(unit: str):
    assert "torch" not in loaded_after(f"import labkit.{unit}")


def test_the_measurement_sees_a_loaded_module():
    assert "json" in loaded_after("import json.decoder")
