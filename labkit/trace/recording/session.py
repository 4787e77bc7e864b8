"""`record()` records a world's runs from a notebook, or one rank from inside its process. In a
notebook, every `world.run` sends a spec to each rank, whose Recorder writes to the run folder; the
folder is read when the block ends. On a single rank, the Recorder is in this process."""

import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar

from labkit.comm import Comm
from labkit.runtime.launchers import launched
from labkit.runtime.transports.chooser import table_note
from labkit.trace import Trace
from labkit.trace.folder import METRICS, RUN, add_metrics, begin_run, read_run
from labkit.trace.recording.recorder import Recorder

# A rank's recording spec: number of the record() block in this driver, run folder, detail step.
Spec = tuple[int, str, int | None]


@dataclass
class Recording:
    """A `record()` block in this process."""

    now: ClassVar["Recording | None"] = None

    folder: Path | None
    detail_step: int | None
    about: dict[str, Any]
    recorder: Recorder  # recorder of this process
    world: object = None  # recorded world; None: this process
    failed: bool = False  # the ranks were stopped and write nothing more
    number: int = field(default_factory=count(1).__next__)

    def spec_for(self, world: object, about: dict[str, Any]) -> Spec | None:
        """The spec for a run of `world` with the entries `about`; None if recording has failed.
        Raises RuntimeError for a second world: a run folder is for one world."""
        if self.failed:  # step and sequence numbers are lost with the ranks
            warnings.warn(
                "the ranks of this record() were stopped, so it records no more; begin a new block",
                stacklevel=2,
            )
            return None
        if self.world is None:
            self.recorder.leave_to_ranks()
            self.world = world
            self.folder = self.folder or Path(tempfile.mkdtemp(prefix="labkit-run-"))
            begin_run(self.folder, {**about, **self.about}, replace=True)
        elif self.world is not world:
            raise RuntimeError("record(): this block has recorded another world; begin a new block")
        assert self.folder is not None
        return self.number, str(self.folder.resolve()), self.detail_step


@contextmanager
def record(
    path: str | Path | None = None,
    detail_step: int | None = None,
    replace: bool = False,
    **about: Any,
) -> Iterator[Trace]:
    """Record the ranks in this block; the trace is filled when the block ends.

    Around `world.run(...)` in a notebook, every rank is recorded. In a single process, or on a rank
    started by torchrun or a World, only this process is recorded; `labkit.read_run(path)` returns
    the trace of all ranks. A training step ends with the optimizer's step. Communication that
    bypasses labkit's communicator, as in torch's DDP, is not recorded.

    Args:
        path: write the run to this folder while it runs; see `labkit.read_run`.
        detail_step: record this step (0 is the first) in detail: memory by category, operations,
            and FLOPs and bytes per span. The step takes several times as long; ignore its times.
        replace: overwrite a run at `path`.
        about: additional entries for `run.json`, such as `seed=3`.

    Raises ValueError as `begin_run`, or if `detail_step` < 0; RuntimeError if already recording.

    >>> with record() as trace:
    ...     world.run(train)
    >>> plot.timeline(trace)
    """
    if Recorder.now is not None:
        raise RuntimeError("record(): this process is already being recorded; end that block first")
    if detail_step is not None and detail_step < 0:
        raise ValueError(f"detail_step={detail_step}: steps are counted from 0")
    rank, comm = 0, None
    try:
        comm = Comm()
        rank, size = comm.ranks[comm.rank], comm.size
    except RuntimeError:  # no process group: a single process, or the driver of a world
        size = 1
        if me := launched():
            raise RuntimeError(
                f"record(): {me.launcher} has started several processes, but this one has no "
                "process group yet; call labkit.attach() or init_process_group before record()"
            ) from None
    folder, elsewhere = Path(path) if path is not None else None, dict[int, str]()
    if folder is not None:
        about_run = {"world_size": size, "table": table_note(), **about}
        if rank == 0:
            begin_run(folder, about_run, replace)
        if comm is not None:
            elsewhere = _begin_elsewhere(folder, about_run, replace, comm)
    trace = Trace()
    recorder = Recorder(rank, size, folder, detail_step)
    Recording.now = recording = Recording(folder, detail_step, about, recorder)
    try:
        with recorder:
            yield trace
        recorder.close()
        if folder is not None and comm is not None and elsewhere:
            _bring_together(folder, comm, elsewhere)
    finally:
        Recording.now = None
        recorder.close()
        if recording.world is None:
            recorded = Trace({rank: recorder.trace}, dict(about), recorder.metrics).from_zero()
        else:
            assert recording.folder is not None
            add_metrics(recording.folder, recorder.metrics)  # metrics of the driver process
            recorded = read_run(recording.folder)
            if folder is None:
                shutil.rmtree(recording.folder, ignore_errors=True)
        _fill(trace, recorded)


def _begin_elsewhere(
    folder: Path, about: dict[str, Any], replace: bool, comm: Comm
) -> dict[int, str]:
    """Begin the run on hosts that do not see rank 0's folder; returns the ranks on these hosts."""
    comm.barrier()  # rank 0 has created its folder
    mine = comm.ranks[comm.rank], "" if (folder / RUN).exists() else socket.gethostname()
    apart = {rank: host for rank, host in comm.all_gather_object(mine) if host}
    first = {host: rank for rank, host in reversed(apart.items())}
    if mine[0] in first.values():
        begin_run(folder, about, replace)
    comm.barrier()
    return apart


def _bring_together(folder: Path, comm: Comm, elsewhere: dict[int, str]) -> None:
    """Copy the files of ranks on other hosts to rank 0, whose folder then has the whole run."""
    rank = comm.ranks[comm.rank]
    comm.barrier()  # all ranks have closed their files
    firsts = {host: one for one, host in reversed(elsewhere.items())}.values()
    names = [f"rank{rank}.jsonl"] * (rank in elsewhere) + [METRICS] * (rank in firsts)
    sent = comm.all_gather_object([(name, (folder / name).read_bytes()) for name in names])
    for name, contents in chain.from_iterable(sent) if rank == 0 else ():
        with (folder / name).open("ab") as file:
            file.write(contents)


def _fill(trace: Trace, recorded: Trace) -> None:
    vars(trace).update(vars(recorded))


class OnRank:
    """Keeps this rank's recorder across runs with the same spec."""

    def __init__(self, rank: int, size: int):
        self._place = rank, size
        self._spec: Spec | None = None
        self._recorder: Recorder | None = None

    @contextmanager
    def following(self, spec: Spec | None) -> Iterator[None]:
        """Record this block unless `spec` is None."""
        if spec != self._spec:
            if self._recorder is not None:
                self._recorder.close()
            self._spec, self._recorder = spec, None
            if spec is not None:
                _, folder, detail_step = spec
                self._recorder = Recorder(*self._place, Path(folder), detail_step)
        with self._recorder or nullcontext():
            yield
