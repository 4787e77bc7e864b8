"""`record()`: the same block around a world's runs in a notebook and inside any one rank. In a
notebook its spec travels with every `world.run` to a Recorder on each rank; the run's folder, which
all ranks write, is read at the end. On one rank there is a Recorder here.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from labkit.comm import Comm
from labkit.runtime.transports.chooser import table_note
from labkit.trace import Trace
from labkit.trace.folder import add_metrics, begin_run, read_run
from labkit.trace.recording.recorder import Recorder

# For a rank to record itself: the block's number in this driver, the run's folder, the detail step.
Spec = tuple[int, str, int | None]


@dataclass
class Recording:
    """A `record()` block in this process."""

    now: ClassVar["Recording | None"] = None

    folder: Path | None
    detail_step: int | None
    about: dict[str, Any]
    recorder: Recorder  # of this process
    world: object = None  # the one that is recorded, where it is not this process
    failed: bool = False  # the ranks were stopped: what they wrote is all there will be
    number: int = field(default_factory=count(1).__next__)

    def spec_for(self, world: object, about: dict[str, Any]) -> Spec | None:
        """For a run of `world`, which `about` describes; None when it is not to be recorded.

        Raises RuntimeError for a second world: a run folder is of one.
        """
        if self.failed:  # its ranks are gone, and with them the numbers of steps and operations
            warnings.warn(
                "this record() has seen its ranks stopped, and records no more; begin a new block",
                stacklevel=2,
            )
            return None
        if self.world is None:
            self.recorder.leave_to_ranks()
            self.world = world
            self.folder = self.folder or Path(tempfile.mkdtemp(prefix="labkit-run-"))
            begin_run(self.folder, {**about, **self.about}, replace=True)
        elif self.world is not world:
            raise RuntimeError("record(): this block has recorded another world; use one for each")
        assert self.folder is not None
        return self.number, str(self.folder.resolve()), self.detail_step


@contextmanager
def record(
    path: str | Path | None = None,
    detail_step: int | None = None,
    replace: bool = False,
    **about: Any,
) -> Iterator[Trace]:
    """Record what the ranks do in this block; the trace is filled when the block ends.

    Around `world.run(...)` in a notebook all ranks are recorded; in a single process, or on a
    rank that torchrun or a World has started, that process: open the folder with
    `labkit.read_run` to see all ranks. A training step ends with the step of the optimizer. What
    is sent past labkit's communicator, as by torch's own DDP, is not seen.

    Args:
        path: keep the run as this folder, written while it runs; see `labkit.read_run`.
        detail_step: record this step (0 is the first) in detail: memory by category, operations
            and bytes of each span. It takes several times as long; its times mean nothing.
        replace: overwrite the run that is at `path`.
        about: more to write down of the run, as `seed=3`.

    Raises ValueError when `path` holds something else, RuntimeError inside another `record()`.

    >>> with record() as trace:
    ...     world.run(train)
    >>> plot.timeline(trace)
    """
    if Recorder.now is not None:
        raise RuntimeError("record(): this process is being recorded already; end that block first")
    if detail_step is not None and detail_step < 0:
        raise ValueError(f"detail_step={detail_step}: steps count from 0")
    rank, comm = 0, None
    try:
        comm = Comm()
        rank, size = comm.ranks[comm.rank], comm.size
    except RuntimeError:  # no process group: one process alone, or the driver of a world
        size = 1
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise RuntimeError(
                "record(): torchrun has started several processes, and this one has no process "
                "group yet; call labkit.attach() or init_process_group before record()"
            ) from None
    folder = Path(path) if path is not None else None
    if folder is not None:
        if rank == 0:
            begin_run(folder, {"world_size": size, "table": table_note(), **about}, replace)
        if comm is not None:
            comm.barrier()  # the others write into the folder that rank 0 has made
    trace = Trace()
    recorder = Recorder(rank, size, folder, detail_step)
    Recording.now = recording = Recording(folder, detail_step, about, recorder)
    try:
        with recorder:
            yield trace
    finally:
        Recording.now = None
        recorder.close()
        if recording.world is None:
            recorded = Trace({rank: recorder.trace}, dict(about), recorder.metrics).from_zero()
        else:
            assert recording.folder is not None
            add_metrics(recording.folder, recorder.metrics)  # what the driver itself has noted
            recorded = read_run(recording.folder)
            if folder is None:
                shutil.rmtree(recording.folder, ignore_errors=True)
        _fill(trace, recorded)


def _fill(trace: Trace, recorded: Trace) -> None:
    vars(trace).update(vars(recorded))


class OnRank:
    """The recorder of this rank, for as long as runs come with the same spec."""

    def __init__(self, rank: int, size: int):
        self._place = rank, size
        self._spec: Spec | None = None
        self._recorder: Recorder | None = None

    @contextmanager
    def following(self, spec: Spec | None) -> Iterator[None]:
        """Record this block if there is a spec."""
        if spec != self._spec:
            if self._recorder is not None:
                self._recorder.close()
            self._spec, self._recorder = spec, None
            if spec is not None:
                _, folder, detail_step = spec
                self._recorder = Recorder(*self._place, Path(folder), detail_step)
        with self._recorder or nullcontext():
            yield
