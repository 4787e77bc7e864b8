"""Bad command lines are refused in one sentence before any work; texts are printed as given."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command import command, python
from labkit import compare, training, write_run
from labkit.bench import machine, precision, transfers
from labkit.cli import app
from labkit.cli import bench as bench_command
from labkit.cli.terminal import _sentence
from labkit.foreign import literal, markup, plain
from labkit.replaying.planning import ranking
from labkit.runtime.errors import RankError
from labkit.runtime.ranks import Ranks
from tables import cases
from traces import sample_trace

PLAN = "plan --model gpt3-175b --cluster selene --gpus 64 --batch 64"
SIZES = "plan --cluster selene --batch 64 --gpus 4"
MANY = 10**26


def limit(*numbers: int) -> re.Pattern[str]:
    """How typer 0.12 and later name the limits of a number."""
    return re.compile("|".join(rf"=x?{n}\b|{n}<=x|or equal to {n}\b" for n in numbers))


REFUSED: dict[str, str | re.Pattern[str]] = {
    # unknown names
    "nosuch": "no command 'nosuch'; choose one of compare, run",
    "bench nosuch": "no bench 'nosuch'; choose one of data-parallel, tensor-parallel",
    "run nosuch": "no strategy 'nosuch'; choose one of single, naive-ddp, parameter-server, ddp",
    "compare nosuch": "no strategy 'nosuch'",
    "run ddp --model nope": "model='nope': choose one of",
    "run ddp --dtype int8": "dtype='int8': choose one of",
    "run ddp --text /nowhere": "no such file",
    "schedule nosuch": "schedule='nosuch': choose one of naive, gpipe",
    "replay RUN --on nosuch": "no cluster 'nosuch'; choose one of h200-node",
    "nccl-log --example nope": "no example 'nope'; choose one of",
    "plan --model nope --cluster selene --batch 8": "no model 'nope'; choose one of megatron-1.7b",
    "plan --model gpt3-175b --cluster nope --batch 8": "no cluster 'nope'",
    "bench data-parallel --only nope": "no benchmark of strategy 'nope'; choose one of ddp, zero-1",
    "bench data-parallel --transport nope": "transport='nope'",
    "bench tensor-parallel --models nope": "no model 'nope'; choose one of tiny, 1M, 3.4M",
    "bench pipeline --models nope": "no model 'nope'; choose one of tiny, 1M, 3.4M",
    "bench pipeline --only nope": "no benchmark of schedule 'nope'; choose one of gpipe, 1f1b",
    "bench precision --only nope": "no benchmark of 'nope'; choose one of fp32",
    "bench collectives --ops nope": "no operation 'nope'; choose one of all_reduce",
    "bench collectives --algorithms nope": "no algorithm 'nope' of these operations; choose",
    "bench collectives --ops broadcast --algorithms ring": "no algorithm 'ring' of these",
    "bench collectives --dtype nope": "no dtype 'nope'; choose one of float32",
    "bench collectives --redop nope": "no reduction 'nope'; choose one of sum, min, max, product",
    "bench transfers --to int8": "to='int8'",
    # files that are not there, or something else
    "view /nowhere": "no run folder at /nowhere",
    "view HERE": "is not a labkit run: it has no run.json",
    "replay /nowhere": "no run folder at",
    "replay RUN --clusters /nowhere": "/nowhere",
    "replay RUN --clusters HERE": "choose a regular file",
    "replay RUN --clusters RUN/run.json": "is not valid TOML",
    f"{PLAN} --clusters /nowhere": "/nowhere",
    "nccl-log /nowhere": "/nowhere",
    "nccl-log HERE": "choose a regular file",
    "nccl-log": "pass either log files or --example",
    "nccl-log x --example two_nodes": "pass either log files or --example",
    # zero, negative, no number
    "run ddp --ranks 0": limit(1),
    "run ddp --ranks -3": limit(1),
    "run ddp --ranks x": "valid int",
    "run ddp --steps 0": limit(1),
    "run ddp --rows 0": limit(1),
    "run ddp --lr nan": "lr=nan",
    "run ddp --lr -1": "lr=-1.0",
    "run ddp --lr inf": "lr=inf",
    "run ddp --seed -1": limit(0),
    "compare ddp --lr nan": "lr=nan",
    "view RUN --step x": "valid int",
    "view RUN --step 99": "no step 99 in this trace; it has 0 to 2",
    "schedule 1f1b --stages 0": limit(1, 256),
    "schedule 1f1b --microbatches -1": limit(1),
    "doctor --cluster x.toml --ranks 0": limit(1),
    "doctor --ranks 3": "--ranks is for measuring; pass --cluster",
    f"{PLAN} --tp 0": "tp=0",
    f"{PLAN} --tp x": "--tp 'x': pass whole numbers, such as --tp 2,4",
    f"{PLAN} --tp 5": "96 heads are not divisible by 5",
    f"{PLAN} --tp ,": "--tp ',': pass whole numbers, such as --tp 2,4",
    f"{PLAN} --microbatch 0": "microbatch=0",
    f"{PLAN} --top 0": limit(1),
    f"{PLAN} --max-memory nan": "max_memory_bytes=nan",
    f"{PLAN} --max-memory -1": "choose more than 0",
    f"{PLAN} --max-memory 500": "NVIDIA A100 SXM4 80 GB has 8e+10",
    "plan --model gpt3-175b --cluster selene --batch 0": limit(1),
    "bench data-parallel --turns 0": limit(3),
    "bench replay --turns 0": limit(3),
    "bench tensor-parallel --ranks x": "--ranks 'x': pass whole numbers, such as --ranks 2,4",
    "bench tensor-parallel --ranks ,": "--ranks ',': pass whole numbers",
    "bench pipeline --ranks ,": "--ranks ',': pass whole numbers",
    "bench pipeline --ranks 0": "1 or more",
    "bench collectives --ranks 2,1": "ranks=1: nothing is sent; measure on 2 ranks or more",
    "bench collectives --ranks two": "--ranks 'two': pass whole numbers",
    "bench collectives --turns 0": "turns=0: choose at least 1",
    "bench collectives --from 0": "'0' is not a size",
    "bench collectives --from 4x": "'4x' is not a size",
    "bench collectives --from 1 --to 1": "fewer than one element of 4 bytes",
    "bench collectives --factor 1": "factor=1",
    "bench collectives --ops ,": "nothing to measure: name at least one operation",
    "bench transfers --mb 0": "mb=0.0",
    "bench transfers --mb nan": "mb=nan",
    "bench transfers --mb inf": "mb=inf",
    "bench transfers --gbps nan": "gbps=nan",
    "bench transfers --gbps -1": "gbps=-1.0",
    # huge
    "run ddp --ranks 100000": "too many for this machine",
    "compare --ranks 100000": "too many for this machine",
    f"run ddp --rows {MANY}": "choose 1 to 65,536",
    f"compare ddp --rows {MANY}": "choose 1 to 65,536",
    f"run ddp --seed {MANY}": f"seed={MANY}",
    "schedule 1f1b --stages 100000": limit(1, 256),
    "schedule naive --stages 100000": limit(1, 256),
    f"schedule gpipe --microbatches {MANY}": "at most 20,000",
    "schedule interleaved --chunks 1000000": "at most 20,000",
    "doctor --cluster x.toml --ranks 100000": "too many for this machine",
    f"plan --model gpt3-175b --cluster selene --batch {MANY} --gpus 64": limit(1048576),
    f"{PLAN} --context {MANY}": limit(4194304),
    f"{SIZES} --width {MANY} --depth 4 --heads 1": limit(131072),
    f"{SIZES} --width 1024 --depth {MANY} --heads 8": limit(2048),
    f"{SIZES} --width 1024 --depth 4 --heads 8 --vocab {MANY}": limit(4194304),
    f"{PLAN} --pp {MANY}": "are not divisible by",
    "plan --model gpt3-175b --cluster selene --batch 64 --gpus 99999999": "choose 1 to 3072",
    "bench tensor-parallel --ranks 100000": "too many for this machine",
    "bench pipeline --ranks 100000": ": 8 blocks are too few",
    "bench collectives --to 99999999999999G": "end at a smaller size",
    "bench collectives --ranks 100000": "end at a smaller size",
    "bench transfers --mb 1e30": "mb=1e+30",
    "bench transfers --mb 1e9": "choose 0 < mb <= 4000",
    # values that do not go together
    "run single --ranks 2": "single trains in one process",
    "run tensor --ranks 5": "12 heads cannot be split evenly over 5 ranks",
    "run sequence --ranks 3 --model tiny": "4 heads cannot be split evenly over 3 ranks",
    "run context --ranks 3 --model tiny": "64 tokens cannot be split into 6 equal chunks",
    "run pipeline --ranks 5 --model tiny": "2 blocks are too few for 5 stages",
    "run pipeline --ranks 2 --rows 3 --model tiny": "3 rows are too few for 4 micro-batches",
    "run three-d --ranks 8 --rows 3 --model tiny": "3 rows cannot be split evenly over 2 replicas",
    "compare pipeline --ranks 7": "4 blocks are too few for 7 stages",
    "schedule interleaved --stages 3 --microbatches 4": "choose a multiple of 3",
    "schedule 1f1b --chunks 2": "for several, use interleaved",
    f"{PLAN} --tp 3": "no layout of 64 ranks",
    f"{PLAN} --zero 3": "zero=3: choose 0 or 1",
    f"{PLAN} --fits --largest": "pass one of them",
    "plan --width 100 --cluster selene --batch 64": "no --depth and no --heads",
    f"{SIZES} --width 100 --depth 4 --heads 3": "is not divisible by heads=3",
    "plan --cluster selene --batch 64": "no model; pass --model",
    "bench pipeline --microbatches 3": "microbatches=3: choose a divisor of 16 rows",
    "bench pipeline --only 1f1b --microbatches 2": "microbatches=2: torch needs 4 or more",
    "bench pipeline --ranks 64": ": 8 blocks are too few",
    "bench collectives --from 8K --to 4K": "put the smaller size first",
    "bench collectives --transport shm --fit": "--fit needs --transport gloo",
    "bench collectives --table x.json": "--table names the file that --fit writes",
    "bench collectives --fit --dtype int32": "--fit needs --dtype float32",
    "bench collectives --fit --ops gather": "a table covers all_reduce",
    "replay RUN --chrome x.json": "name its cluster with --on",
    "replay RUN --on selene --on selene --chrome x.json": "--chrome writes one replay",
}

# Each option that names a file to write, without its value; pictures have a suffix.
JSON_OUTPUTS = [
    "view RUN --chrome", "replay RUN --on selene --chrome", "doctor --cluster",
    "bench tensor-parallel --save", "bench pipeline --save", "bench precision --save",
    "bench collectives --save", "bench collectives --fit --table", "bench transfers --save",
]  # fmt: skip
PICTURES = [
    "schedule 1f1b --plot", f"{PLAN} --plot", f"{PLAN} --json --plot",
    "nccl-log --example two_nodes --out", "bench collectives --plot", "bench transfers --plot",
]  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(sample_trace(2), tmp_path_factory.mktemp("run") / "run")


def failing(error: Exception) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


@pytest.fixture
def before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes its time fails the test, which is about a refusal before any work."""
    for owner, name in (
        (Ranks, "__init__"), (compare, "_recorded"), (machine, "measure_machine"),
        (ranking, "plan"), (transfers, "measure"), (precision, "bench_precision"),
        (bench_command, "print_table"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, failing(AssertionError("this is work")))


def refusal(line: str, run_folder: Path, here: Path) -> str:
    """What the command prints, in one line; it must have ended with status 2."""
    line = line.replace("RUN", str(run_folder)).replace("HERE", str(here))
    shown = command(line, 2, env={"COLUMNS": "1000"})
    assert "Traceback" not in shown
    return shown


@pytest.mark.parametrize("line", REFUSED)
def test_a_bad_value_is_refused_in_one_sentence(
    line: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if line.split()[0] != "plan" and "--step" not in line and "--ranks 5" not in line:
        monkeypatch.setattr(Ranks, "__init__", lambda *_, **__: pytest.fail("ranks are started"))
    monkeypatch.chdir(tmp_path)
    said, expected = refusal(line, run_folder, tmp_path), REFUSED[line]
    assert expected in said if isinstance(expected, str) else expected.search(said), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_plan_is_refused_before_what_replays_steps_is_imported() -> None:
    program = """import sys; from labkit.cli import main
try: main()
finally: print([name for name in sys.modules if name.endswith((".ranking", ".layers"))])"""
    for asked in ("--fits --largest", "--tp x"):
        done = python("-c", program, *f"{PLAN} {asked}".split(), status=2)
        assert done.stdout.splitlines()[-1] == "[]", done.stdout


@pytest.mark.parametrize("line", [*JSON_OUTPUTS, *PICTURES])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    line: str, run_folder: Path, tmp_path: Path, before_work: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    suffix = ".png" if line in PICTURES else ".toml" if "--cluster" in line else ".json"
    (tmp_path / f"folder{suffix}").mkdir()
    (outside := tmp_path / "outside").write_text("mine")
    (tmp_path / f"link{suffix}").symlink_to(outside)
    os.mkfifo(tmp_path / f"fifo{suffix}")
    for name, says in (
        (f"/nope/x{suffix}", "the folder /nope does not exist"),
        (f"outside/x{suffix}", "the folder outside does not exist"),
        (f"folder{suffix}", "is a folder"),
        (f"link{suffix}", "is a link"),
        (f"fifo{suffix}", "is not a regular file"),
    ):
        assert says in refusal(f"{line} {name}", run_folder, tmp_path)
    if line in PICTURES:
        assert "must end in one of .png" in refusal(f"{line} x.txt", run_folder, tmp_path)
        assert "must end in one of .png" in refusal(f"{line} x", run_folder, tmp_path)
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        assert "is not writable" in refusal(f"{line} closed/x{suffix}", run_folder, tmp_path)
    assert outside.read_text() == "mine"


def test_a_run_is_recorded_into_a_new_folder_only(
    run_folder: Path, tmp_path: Path, before_work: None
) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("RUN", "HERE", "HERE/file"):
        says = refusal(f"run ddp --record {name}", run_folder, tmp_path)
        assert "is not an empty folder" in says
    assert (tmp_path / "file").read_text() == "mine"


@cases(
    ("compare ddp --model tiny --out HERE", "compare.png"),
    ("compare ddp --model tiny --out HERE", "steps.png"),
    ("nccl-log --example two_nodes", "two_nodes.png"),
)
def test_nothing_is_drawn_through_a_link(
    line: str, picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_work: None
) -> None:
    (outside := tmp_path / "outside").write_text("mine")
    (here := tmp_path / "here").mkdir()
    (here / picture).symlink_to(outside)
    monkeypatch.chdir(here)
    assert "is a link" in refusal(line, here, here)
    assert outside.read_text() == "mine"


def test_what_ranks_refuse_by_a_value_error_is_its_sentence_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = "rows [3] are not enough [/x]; give 4"
    monkeypatch.setattr(training, "train", failing(ValueError(says)))
    line = "run ddp --ranks 2 --model tiny"
    done = CliRunner().invoke(app, line.split(), env={"COLUMNS": "1000"})
    assert done.exit_code == 2 and done.output.strip().splitlines()[-1] == f"labkit: {says}"
    assert "Traceback" not in done.output and "stopped" not in done.output


def test_any_other_error_of_ranks_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "train", failing(KeyError("a fault of labkit")))
    shown = command("run ddp --ranks 2 --model tiny", 2)
    assert "Traceback" in shown and "a fault of labkit" in shown


def test_errors_that_differ_between_ranks_are_all_shown() -> None:
    texts = [
        f"rank {error}\n\nTraceback (most recent call last):\n  ...\n"
        for error in ("0 raised ValueError: too few rows", "1 raised KeyError: x")
    ]
    assert _sentence("\n".join(texts)) == "\n".join(texts)
    assert _sentence(texts[0]) == "too few rows"
    assert _sentence("ranks 0 and 1 are stuck") == "ranks 0 and 1 are stuck"
    text = "ranks 0, 1 and 2 raised ValueError: two\n\nparagraphs\n\nTraceback (most recent"
    assert _sentence(text) == "two\n\nparagraphs"


def test_a_fault_of_labkit_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "plan", failing(RuntimeError("a fault of labkit")))
    done = CliRunner().invoke(app, PLAN.split())
    assert isinstance(done.exception, RuntimeError) and "a fault" in str(done.exception)


@pytest.mark.parametrize(
    "line",
    ["run {}", "compare {}", "view {}", "replay {}", "replay RUN --on {}", "schedule {}",
     "nccl-log {}", "nccl-log --example {}", "run ddp --model {}", "run ddp --text {}",
     "plan --model gpt3-175b --batch 8 --cluster {}", "bench {}", "{}",
     "bench collectives --ops {}", "bench precision --only {}", "schedule 1f1b --plot {}"],
)  # fmt: skip
@pytest.mark.parametrize("text", ["[/x]", "[nope]", "[bold]x[/]", "x\x1b[31m\x1b]0;t\x07"])
def test_what_a_user_writes_is_printed_as_it_is(
    line: str, text: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    says = refusal(line.format(text), run_folder, tmp_path)
    assert "\x1b" not in says and "\x07" not in says
    assert text in says or "x\\x1b[31m" in says or "x\\\\x1b[31m" in says


def test_an_error_s_text_with_tags_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "no [/x] and [nope] in [red]this[/red]\\"
    for error in (ValueError(text), OSError(text), RankError(text)):
        monkeypatch.setattr(ranking, "plan", failing(error))
        assert text in refusal(PLAN, Path(), Path())


def test_problems_of_a_cluster_file_are_printed_as_they_are(
    run_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(
        '[clusters."[/x]"]\ntitle = "[nope]\\u001b[31m"\ndevice = "v100"\nnodes = 1\n'
        '[[clusters."[/x]".levels]]\ndevices = 1\nports = 1\n'
        'bytes_per_s = [1e9, "a guess"]\nlatency_s = [0, "a guess"]\n'
    )
    options = f"--clusters {tmp_path}/mine.toml --on [/x] --on selene --measured"
    shown = command(f"replay {run_folder} {options}", env={"COLUMNS": "1000"})
    assert "not on [/x]: 2 ranks do not fit on [nope]\\x1b[31m" in shown


def test_plain_text_keeps_letters_and_spells_out_what_controls_a_terminal() -> None:
    assert plain("Größe 3 µs → 北京 👍 a\nb\tc") == "Größe 3 µs → 北京 👍 a\nb\tc"
    assert plain("\x1b[0m\x9b\x7f\r\x00\u202e\ud800") == "\\x1b[0m\\x9b\\x7f\\r\\x00\\u202e\\ud800"
    assert markup("[red]x") == "\\[red]x" and markup(Path("a[b]")) == "a\\[b]"
    assert literal("$a$\x1b\nb") == "\\$a\\$\\x1b b"


def test_the_real_command_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    line = "labkit bench collectives --save /nope/x"
    done = python("-m", *line.split(), status=2, timeout=300, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.startswith(
        "labkit: /nope/x cannot be written: the folder /nope does not exist"
    )
    assert done.stdout.count("\n") == 1
