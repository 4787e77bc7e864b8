"""`%%ranks` and `%ranks`: in IPython, and in a real Jupyter kernel with its interrupt button."""

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit import RankError
from provoke import ROOT, alive, gone, until
from tables import cases, raises

pytest.importorskip("IPython", reason="the magics need IPython")
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "labkit")
    yield shell
    shell.run_line_magic("ranks", "close")
    InteractiveShell.clear_instance()


Printed = Callable[[], str]


def ranks(shell: InteractiveShell, line: str, cell: str) -> Any:
    return shell.run_cell_magic("ranks", line, cell)


def values(shell: InteractiveShell, line: str, cell: str) -> Any:
    """The values of a cell, brought here."""
    assert ranks(shell, f"{line} -o brought", cell) is None
    return shell.user_ns.pop("brought")


def test_a_cell_runs_on_every_rank_and_gives_its_last_expression(
    shell: InteractiveShell, printed: Printed
) -> None:
    brought = values(shell, "4", "x = rank * 10\nx + size")
    assert brought == [4, 14, 24, 34]
    assert repr(brought) == repr(ranks(shell, "4", "x + size"))
    assert repr(brought).splitlines() == ["rank 0: 4", "rank 1: 14", "rank 2: 24", "rank 3: 34"]
    assert values(shell, "4", "None if rank else 5") == [5, None, None, None]
    cell = "x = torch.ones(1)\ncomm.all_reduce(x)\ndist.barrier()\nx.item(), str(device)"
    assert values(shell, "4", cell) == [(4.0, "cpu")] * 4
    printed()
    assert ranks(shell, "4", "print('hello')") is None
    assert sorted(printed().splitlines()) == [f"[rank {k}] hello" for k in range(4)]


def test_names_last_and_a_list_of_ranks_runs_there_only(shell: InteractiveShell) -> None:
    ranks(shell, "4", "kept, seen = rank, False")
    assert values(shell, "4", "kept + 1") == values(shell, "", "kept + 1") == [1, 2, 3, 4]
    assert values(shell, "0,2", "seen = True\nrank") == [0, 2]
    assert values(shell, "4", "seen") == [True, False, True, False]
    assert values(shell, "2,", "rank") == [2]
    assert values(shell, " 3 , 1 ", "rank") == [3, 1]
    assert repr(ranks(shell, "1,", "rank")) == "rank 1: 1"


def test_an_error_shows_the_line_of_the_cell(shell: InteractiveShell) -> None:
    cell = "def f(y):\n    return 1 // y  # the line\n\nf(rank - 2)"
    words = ("return 1 // y  # the line", "%%ranks cell", "line 2, in f")
    assert raises(words, ranks, shell, "4", cell, error=RankError).ranks == (2,)
    assert values(shell, "4", "rank") == [0, 1, 2, 3]


def test_ranks_shows_and_resets_the_world(shell: InteractiveShell, printed: Printed) -> None:
    ranks(shell, "4", "kept = 1")
    printed()
    shell.run_line_magic("ranks", "")
    assert "4 ranks, gloo" in printed()
    shell.run_line_magic("ranks", "reset")
    assert "new ranks" in printed()
    assert values(shell, "4", "'kept' in globals()") == [False] * 4
    usage = "use %ranks, %ranks reset or %ranks close"
    raises(usage, shell.run_line_magic, "ranks", "explode", error=UsageError)


def test_another_size_makes_another_world(shell: InteractiveShell, printed: Printed) -> None:
    pids = values(shell, "4", "import os; os.getpid()")
    printed()
    assert values(shell, "2", "size") == [2, 2]
    assert "2 ranks replace 4, whose variables are gone" in printed()
    assert gone(pids)
    assert values(shell, "", "size") == [2, 2]
    assert values(shell, "4", "size") == [4] * 4


USAGE = "pass a number of ranks .%%ranks 4. or a list"


@cases(
    *[(line, UsageError, USAGE) for line in ("four", "1 2", "0,x", "1.5", ",", "-h", "0,,1")],
    *[(line, UsageError, "NAME: pass a name") for line in ("3 -o", "3 -o 1x", "3 -o a b")],
    ("0,7", UsageError, "there is no rank 7; choose 0 to 3"),
    ("0", ValueError, "at least 1"),
    ("-1", ValueError, "at least"),
    ("9999", ValueError, "too many"),
)
def test_a_wrong_line_says_what_is_right_and_does_not_cost_the_world_there_is(
    line: str, error: type[Exception], says: str, shell: InteractiveShell
) -> None:
    pids = values(shell, "", "import os; os.getpid()")
    raises(says, ranks, shell, line, "rank", error=error)
    assert values(shell, "", "os.getpid()") == pids


def test_the_cell_after_a_close_has_new_ranks(shell: InteractiveShell, printed: Printed) -> None:
    pids = values(shell, "", "import os; os.getpid()")
    shell.run_line_magic("ranks", "close")
    assert gone(pids)
    printed()
    shell.run_line_magic("ranks", "")
    shell.run_line_magic("ranks", "reset")
    assert printed().count("no world yet") == 2
    raises("at least 1", ranks, shell, "0", "rank")
    assert values(shell, "0,1", "size") == [4, 4], "a list alone makes the usual world"


def test_a_value_shows_itself_and_stays_on_its_rank(shell: InteractiveShell) -> None:
    ranks(shell, "3", "from labkit import DDP\nmodel = DDP(torch.nn.Linear(2, 3))\nkept = rank")
    assert "Linear(in_features=2" in repr(ranks(shell, "", "model")), "which cannot be pickled"
    assert "generator" in repr(ranks(shell, "", "(x for x in ())"))
    shown = repr(ranks(shell, "", "torch.full((2,), rank + 0.0)"))
    assert "tensor([2., 2.])" in shown.splitlines()[2]
    bad = "class Bad:\n    def __repr__(self): raise ValueError\nBad()"
    assert "its repr raised ValueError" in repr(ranks(shell, "", bad))
    page = (
        "class Page:\n    def __repr__(self): return '<text>'\n"
        "    def _repr_html_(self): return f'<b>{rank}</b>'\n"
        "Page() if rank < 2 else '<plain>'"
    )
    pages = ranks(shell, "", page)
    html = pages._repr_html_()
    assert "<b>0</b>" in html and "<b>1</b>" in html and "&lt;plain&gt;" in html
    assert "rank 0: <text>" in repr(pages) and ranks(shell, "", "rank")._repr_html_() is None
    raises("All ranks keep their variables", ranks, shell, "0,2", "undefined_name", error=RankError)
    tensors = values(shell, "", "kept * torch.ones(2)")
    assert [x.tolist() for x in tensors] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


# ---- a real kernel


class Kernel:
    """A Jupyter kernel as a notebook has it."""

    def __init__(self, folder: Path):
        pytest.importorskip("ipykernel", reason="needs a Jupyter kernel")
        client = pytest.importorskip("jupyter_client", reason="needs a Jupyter client")
        self.folder = folder
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        self.manager = client.KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def begin(self, code: str) -> str:
        """Start a cell. Returns once the kernel executes it: earlier, an interrupt is ignored."""
        request: str = self.client.execute(code)
        for message in self._received(request, 60):
            if message["msg_type"] == "execute_input":
                self.cell_number: int = message["content"]["execution_count"]
                break
        return request

    def messages(self, request: str, within_s: float = 60) -> Iterator[dict[str, Any]]:
        """What the cell of `request` puts out, until it is done."""
        for message in self._received(request, within_s):
            if message["msg_type"] != "status":
                yield message
            elif message["content"]["execution_state"] == "idle":
                return

    def _received(self, request: str, within_s: float) -> Iterator[dict[str, Any]]:
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") == request:
                yield message
        raise AssertionError(f"the cell has not come so far in {within_s} s")

    def run(self, code: str) -> list[tuple[str, str]]:
        """Kind and text of all that a cell puts out."""
        return [output_of(message) for message in self.messages(self.begin(code))]

    def stop(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


def output_of(message: dict[str, Any]) -> tuple[str, str]:
    """Kind and text of what a cell puts out."""
    content = message["content"]
    if message["msg_type"] == "stream":
        return content["name"], content["text"]
    if message["msg_type"] == "error":
        return "error", "\n".join(content["traceback"])
    return message["msg_type"], content.get("data", {}).get("text/plain", "")


DRAWN = ("display_data", "update_display_data")


def text_of(outputs: list[tuple[str, str]], wanted: str = "execute_result") -> str:
    return "\n".join(text for kind, text in outputs if kind == wanted)


def kernel_fixture(first_cell: str = "") -> Any:
    """A fixture: a kernel for the tests of a file, which are slow; it has run a first cell."""

    @pytest.fixture(scope="module", params=[pytest.param("kernel", marks=pytest.mark.slow)])
    def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
        kernel = Kernel(tmp_path_factory.mktemp("kernel"))
        assert text_of(kernel.run(first_cell), "error") == ""
        yield kernel
        kernel.stop()

    return kernel


kernel = kernel_fixture("%load_ext labkit")


def test_a_notebooks_cell_gives_its_values_and_its_output_grouped_by_rank(kernel: Kernel) -> None:
    outputs = kernel.run("%%ranks 2\nfor k in range(3):\n    print('line', k)\nrank * 2")
    assert "2 ranks, gloo" in text_of(outputs, "stdout"), "it says what it picked"
    assert text_of(outputs) == "rank 0: 0\nrank 1: 2"
    drawn = [text for kind, text in outputs if kind in DRAWN]
    grouped = [f"[rank {rank}] line {k}" for rank in (0, 1) for k in range(3)]
    assert drawn[-1].splitlines() == grouped
    assert not text_of(outputs, "error")


def test_output_and_bars_appear_in_the_cell_while_it_runs(kernel: Kernel) -> None:
    flag = kernel.folder / "go"
    request = kernel.begin(
        "%%ranks 2\nimport os, time\nprint('early')\nprint('\\r 50%', end='')\n"
        f"while not os.path.exists({str(flag)!r}):\n    time.sleep(0.01)\nprint('\\r100%')"
    )
    seen = []
    for message in kernel.messages(request):
        kind, text = output_of(message)
        if kind in DRAWN:
            seen.append(text)
            if all(f"[rank {rank}]  50%" in text for rank in (0, 1)):
                flag.touch()
    assert flag.exists(), f"the bars were not seen while the cell ran: {seen}"
    last = [f"[rank {rank}] {text}" for rank in (0, 1) for text in ("early", "100%")]
    assert seen[-1].splitlines() == last


def test_functions_and_classes_of_cells_travel(kernel: Kernel) -> None:
    kernel.run("from labkit import World, Comm\nimport torch\nbase = 5")
    kernel.run("class Box:\n    def __init__(self, x):\n        self.x = x")
    kernel.run("def f(y):\n    return Box(base + y + Comm().rank)")
    outputs = kernel.run(
        "with World(2) as world:\n    boxes = world.run(f, 1)\n[x.x for x in boxes]"
    )
    assert text_of(outputs) == "[6, 7]", outputs


def test_an_error_in_a_notebook_shows_the_cells_own_lines(kernel: Kernel) -> None:
    text = text_of(kernel.run("%%ranks 2\ny = rank\n1 // y  # the line of the cell"), "error")
    assert "RankError: rank 0 raised ZeroDivisionError" in text
    assert "1 // y  # the line of the cell" in text and "line 2" in text
    assert "labkit/runtime" not in text
    assert text_of(kernel.run("%%ranks 2\nrank")) == "rank 0: 0\nrank 1: 1"


def test_an_error_of_a_function_names_its_cell_as_the_notebook_does(kernel: Kernel) -> None:
    kernel.run(
        "from labkit import Comm, World\n"
        "def fails():\n    raise ValueError('from a cell')  # its line\n\n"
        "def hangs():\n    if Comm().rank:\n        Comm().barrier()  # where it hangs"
    )
    number = kernel.cell_number
    text = text_of(kernel.run("with World(2) as w:\n    w.run(fails)"), "error")
    assert "raise ValueError('from a cell')  # its line" in text
    assert f"Cell In[{number}], line 3, in fails" in text
    text = text_of(kernel.run("with World(2) as w:\n    w.run(hangs)"), "error")
    assert "rank 1: waits in barrier" in text and f"at In[{number}]:7 in hangs" in text


def test_the_interrupt_button_stops_a_hanging_cell_and_the_next_one_works(kernel: Kernel) -> None:
    before = text_of(kernel.run("%%ranks 2\nimport os\nos.getpid()"))
    pids = [int(line.split()[-1]) for line in before.splitlines()]
    flag = kernel.folder / "hangs"
    hang = f"open({str(flag)!r}, 'w').close()\nimport time\ntime.sleep(600)"
    request = kernel.begin(f"%%ranks 2\n{hang}")
    assert until(flag.exists)
    kernel.manager.interrupt_kernel()
    outputs = [output_of(message) for message in kernel.messages(request)]
    assert "interrupted; the 2 ranks were stopped" in text_of(outputs, "error")
    assert gone(pids)
    assert text_of(kernel.run("%%ranks 2\nrank")) == "rank 0: 0\nrank 1: 1"
    assert text_of(kernel.run("1 + 1")) == "2"


def test_an_interrupt_while_nothing_runs_harms_no_rank(kernel: Kernel) -> None:
    kernel.run("%%ranks 2\nkept = rank")
    kernel.manager.interrupt_kernel()
    assert text_of(kernel.run("%%ranks 2\nkept")) == "rank 0: 0\nrank 1: 1"


def test_a_flood_in_a_notebook_does_not_drown_it(kernel: Kernel) -> None:
    outputs = kernel.run("%%ranks 2\nprint('flood\\n' * 1_000_000)\nrank")
    assert text_of(outputs) == "rank 0: 0\nrank 1: 1"
    assert sum(len(text) for _, text in outputs) < 5_000_000
    assert "lines left out" in outputs[-2][1]


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("kill the group",), ("restart", "shutdown")], ids=" ".join)
def test_a_kernel_that_ends_leaves_nothing(ways: tuple[str, ...], tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    try:
        for way in ways:
            kernel.run("%load_ext labkit")
            # The server was warmed up early: even the first ranks have what an optimizer imports.
            loaded = kernel.run("%%ranks 2\nimport sys\n'torch._dynamo' in sys.modules")
            assert "rank 1: True" in text_of(loaded)
            process = psutil.Process(kernel.manager.provisioner.pid)
            family = [child.pid for child in process.children(recursive=True)]
            assert len(family) == 3 and all(map(alive, family))
            assert any(tmp_path.glob("labkit-*"))
            kernel.begin("%%ranks 2\nimport time\ntime.sleep(600)")
            until(lambda: False, 0.5)
            if way == "kill the group":
                os.killpg(process.pid, signal.SIGKILL)
            elif way == "restart":
                kernel.manager.restart_kernel(now=True)
                kernel.client.wait_for_ready(timeout=60)
            else:
                kernel.manager.shutdown_kernel()
            assert gone(family)
            assert until(lambda: not any(tmp_path.glob("*labkit-*")))
    finally:
        kernel.stop()
