"""record() writes down what happened, of any model and loop, and leaves nothing behind."""

import gc
import os
import re
import shutil
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import labkit
from command import python
from labkit import DDP, GPT, MLP, Batch, Comm, Link, NaiveDDP, RankError, World, loss, record
from labkit.comm import here
from labkit.parallel.common.held import held
from labkit.plot.choice import choose_step
from labkit.runtime.clock import HostClock, StreamClock
from labkit.trace import CATEGORIES, Span, Trace
from labkit.trace.folder import read_run
from labkit.trace.recording.recorder import Recorder
from laws import broken_laws
from small_models import Custom
from tables import raises
from worlds import world_fixture

pytestmark = pytest.mark.slow

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS, OTHER = range(len(CATEGORIES))

world = world_fixture(3)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = nn.Module.__call__, torch.autograd.backward
    yield
    assert (nn.Module.__call__, torch.autograd.backward) == before
    assert Recorder.now is None and not here.listeners


class Loop:
    """A model, its optimizer, and one step of training."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] | None = None):
        torch.manual_seed(0)
        self.model = GPT.preset("tiny", vocab=64, context=16)
        self.wrapped = wrap(self.model) if wrap else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        tokens = torch.randint(0, 64, (3, 17))
        self.batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 3 * 16)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss(self.wrapped(self.batch.x), self.batch).backward()
        self.optimizer.step()


def recorded(*steps: Callable[[], object], detail_step: int | None = None) -> Trace:
    with record(detail_step=detail_step) as trace:
        for step in steps:
            step()
    assert broken_laws(trace) == []
    return trace


def spans_of(trace: Trace, phase: str, step: int = 0) -> list[Span]:
    (one,) = trace.ranks.values()
    spans = [x for x in one.spans if x.phase == phase and x.step == step]
    return sorted(spans, key=lambda span: (span.began_s, span.depth))


def test_forward_has_every_module_inside_its_parent_and_backward_in_reverse() -> None:
    loop = Loop()
    trace = recorded(loop.step)
    spans = spans_of(trace, "forward")
    names = [span.module for span in spans if span.kind != "loss"]
    assert set(names) == {name for name, _ in loop.model.named_modules()} - {"blocks"}
    for span in spans[:-1]:
        assert span.kind == type(loop.model.get_submodule(span.module)).__name__
        path = span.module.replace("blocks.", "").split(".")  # a list is never called
        assert span.depth == (len(path) if span.module else 0)
    assert spans[-1].module == "loss" and spans[-1].depth == 0
    # Backward goes through them in reverse.
    whole, *modules = spans_of(trace, "backward")
    assert (whole.depth, whole.module) == (0, "")
    assert all(span.depth == 1 for span in modules)
    assert all(x.ended_s <= y.began_s for x, y in pairwise(modules))
    assert whole.began_s <= modules[0].began_s and modules[-1].ended_s <= whole.ended_s
    leaves = [x.module for x in modules if x.kind in ("Linear", "LayerNorm", "Embedding")]
    forward = [x.module for x in spans if x.module in leaves]
    assert [x for x in leaves if "attn" not in x] == [x for x in forward[::-1] if "attn" not in x]
    some = {"head", "blocks.1.mlp.up", "blocks.0.attn.core", "embed.tokens"}
    assert some <= {x.module for x in modules}


def functional() -> nn.Module:
    """Computes between its children, in forward itself."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) * 2)

    return Custom(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8))


def test_what_a_parent_computes_between_its_children_is_its_own() -> None:
    model = functional()
    trace = recorded(lambda: model(torch.ones(2, 8)).sum().backward(), detail_step=0)
    _, second, own, first = spans_of(trace, "backward")
    assert [second.module, own.module, first.module] == ["second", "", "first"]
    assert own.flops == 0 and own.moved_bytes, "the tanh and the product, no matrix"


def test_steps_end_with_the_optimizer() -> None:
    loop = Loop()
    trace = recorded(*[loop.step] * 3)
    assert trace.steps() == [0, 1, 2]
    for step in trace.steps():
        (span,) = spans_of(trace, "optimizer", step)
        assert span.kind == "AdamW"
        rank = trace.step(step).ranks[0]
        assert rank.steps[0].ended_s >= max(x.ended_s for x in rank.spans)


def test_accumulation_is_one_step_and_evaluation_another() -> None:
    loop = Loop()

    with record() as trace:
        for _ in range(3):
            loss(loop.model(loop.batch.x), loop.batch).backward()
        loop.optimizer.step()
        with torch.no_grad():
            loop.model(loop.batch.x)
    assert trace.steps() == [0, 1] and broken_laws(trace) == []
    assert len([x for x in spans_of(trace, "backward") if x.depth == 0]) == 3
    assert spans_of(trace, "backward", 1) == []


def test_modules_used_twice_tied_and_frozen() -> None:
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        x = self.body(self.body(x))
        return self.frozen(self.head(x)), {"aux": [x]}

    body, head, frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
    head.weight = body.weight
    model = Custom(forward, body=body, head=head, frozen=frozen)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def step() -> None:
        y, aux = model(torch.ones(2, 6))
        (y.sum() + aux["aux"][0].sum()).backward()
        optimizer.step()

    trace = recorded(step, step, detail_step=1)
    forward, backward = (
        [x.module for x in spans_of(trace, phase)] for phase in ("forward", "backward")
    )
    assert forward == ["", "body", "body", "head", "frozen", "loss"]
    assert backward == ["", "frozen", "head", "body", "body"]
    tied_bytes = 4 * (6 * 6 + 6 + 6)
    held_bytes = trace.step(1).ranks[0].memory[-1].held_bytes
    assert held_bytes[PARAMETERS] == tied_bytes + 4 * (6 * 6 + 6)
    assert held_bytes[GRADIENTS] == tied_bytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_forward_inside_backward(reentrant: bool) -> None:
    model, x = functional(), torch.ones(2, 8, requires_grad=True)
    trace = recorded(lambda: checkpoint(model, x, use_reentrant=reentrant).sum().backward())
    outer = spans_of(trace, "backward")[0]
    again = [x for x in spans_of(trace, "forward") if x.began_s > outer.began_s]
    assert [x.module for x in again][:2] == ["", "first"]
    assert all(x.depth > 0 for x in again)
    assert {"first", "second"} <= {x.module for x in spans_of(trace, "backward")}


def test_an_error_in_forward_ends_the_spans_and_passes_through() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("deliberate")

    model = nn.Sequential(nn.Linear(2, 2), Custom(forward))
    with record() as trace:
        raises("deliberate", model, torch.ones(1, 2), error=KeyError)
        model[0](torch.ones(1, 2))
    assert broken_laws(trace) == []
    spans = [(x.module, x.depth) for x in spans_of(trace, "forward")]
    assert spans == [("", 0), ("0", 1), ("1", 1), ("0", 0)]


def test_gradients_and_results_are_the_same_as_without() -> None:
    plain, watched = Loop(), Loop()
    for _ in range(3):
        plain.step()
    recorded(*[watched.step] * 3, detail_step=1)
    both = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(expected, found) for expected, found in both)


def test_a_block_that_an_error_ends_is_incomplete(tmp_path: Path) -> None:
    with pytest.raises(KeyError), record(tmp_path / "run") as trace:
        Loop().step()
        raise KeyError("deliberate")
    assert not trace.complete and spans_of(trace, "optimizer")
    again = read_run(tmp_path / "run")
    assert not again.complete and len(again.ranks[0].spans) == len(trace.ranks[0].spans)


def test_own_spans_and_metrics() -> None:
    with record(seed=7) as trace:
        for loss in (1.5, 2.5):
            with labkit.span("sampling"):
                labkit.metric(loss=loss)
    assert [x.module for x in spans_of(trace, "user")] == ["sampling"] * 2
    assert trace.metrics == [{"step": 0, "rank": 0, "loss": loss} for loss in (1.5, 2.5)]
    assert trace.about["seed"] == 7
    with labkit.span("outside a record"):
        labkit.metric(loss=0.0)


def test_mistakes_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raises("steps are counted from 0", record(detail_step=-1).__enter__)
    with record(), pytest.raises(RuntimeError, match="already"), record():
        pass
    (tmp_path / "notes.txt").write_text("notes")
    raises("not a labkit run", record(tmp_path).__enter__)
    assert (tmp_path / "notes.txt").read_text() == "notes"
    # Under torchrun the group comes first.
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    raises(r"labkit.attach\(\)", record().__enter__, error=RuntimeError)


def states_of(states: Any) -> tuple[int, int, int]:
    return states.parameter_bytes, states.gradient_bytes, states.optimizer_bytes


def test_memory_by_category_is_the_formula_to_the_byte() -> None:
    loop = Loop()
    memory = recorded(loop.step, detail_step=0).ranks[0].memory
    expected = states_of(held(loop.model, loop.optimizer))
    assert max(x.held_bytes[PARAMETERS] for x in memory) == expected[PARAMETERS]
    assert memory[0].held_bytes[GRADIENTS] == memory[0].held_bytes[OPTIMIZER] == 0, "they come"
    assert memory[-1].held_bytes[OPTIMIZER] == expected[OPTIMIZER]
    trace = recorded(*[loop.step] * 3, detail_step=2)
    assert trace.step(2).ranks[0].memory[-1].held_bytes[: OPTIMIZER + 1] == expected
    assert not trace.step(1).ranks[0].memory, "only the step in detail"


MEMORY_TRACKER = """
import gc, sys, torch
from torch.distributed._tools.mem_tracker import MemTracker
from labkit import GPT, Batch, loss, record

def peak(package, optimizer_class):
    torch.manual_seed(0)
    model = GPT.preset("1M", vocab=256, context=64)
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (4, 65))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 256)

    def step():
        optimizer.zero_grad()
        loss(model(batch.x), batch).backward()
        optimizer.step()

    if package == "labkit":
        with record(detail_step=1) as trace:
            step()
            step()
        return max(sum(x.held_bytes) for x in trace.step(1).ranks[0].memory)
    step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer, batch.x, batch.y)
    with tracker:
        step()
    return sum(x["Total"] for x in tracker.get_tracker_snapshot("peak").values())

for optimizer_class in (torch.optim.AdamW, torch.optim.SGD):
    print("PEAK", peak(sys.argv[1], optimizer_class))
    gc.collect()
"""


def test_the_peak_agrees_with_torchs_tracker() -> None:
    """Each in a process of its own, so that neither sees the other's tensors."""
    measure = partial(python, "-W", "ignore", "-c", MEMORY_TRACKER)
    with ThreadPoolExecutor() as pool:  # at once: each is mostly its imports
        theirs, ours = (
            [int(peak) for peak in re.findall(r"^PEAK (\d+)$", done.stdout, re.MULTILINE)]
            for done in pool.map(measure, ("torch", "labkit"))
        )
    assert ours == pytest.approx(theirs, rel=0.05) and len(theirs) == 2
    assert ours[0] > ours[1], "AdamW has its moments"


def test_operations_are_those_of_torchs_counter() -> None:
    loop = Loop()
    loop.step()
    with FlopCounterMode(display=False) as counter:
        loop.step()
    counted = recorded(loop.step, loop.step, detail_step=1)
    flops: Counter[tuple[str, str]] = Counter()
    for span in counted.step(1).ranks[0].spans:
        flops[span.phase, span.module] += span.flops or 0
    attention = sum(n for (_, name), n in flops.items() if name.endswith("core"))
    assert sum(flops.values()) - attention == counter.get_total_flops(), "torch counts no CPU sdpa"
    rows, length, width, blocks = 3, 16, 12, 2
    assert flops["forward", "blocks.0.mlp.up"] == 2 * rows * length * width * 4 * width
    assert flops["backward", "blocks.0.mlp.up"] == 2 * flops["forward", "blocks.0.mlp.up"]
    core = 2 * 2 * rows * length * length * width  # both matrix products, unmasked
    assert flops["forward", "blocks.1.attn.core"] == core
    assert attention == blocks * (core + 5 * core // 2)


def test_memory_freed_by_resizing_is_seen() -> None:
    x, parameter = torch.ones(1000), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step() -> None:
        x.untyped_storage().resize_(0)
        parameter.grad = torch.ones(2)
        optimizer.step()

    memory = recorded(step, detail_step=0).ranks[0].memory
    held = [point.held_bytes[OTHER] for point in memory]
    assert max(held) - 4000 in held, "at once, and not at the end of the step"


class FakeGpu:
    """Stands for torch.cuda: each event passes 10 s of GPU time after the event before; `passed` of
    them have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.enqueued: list[Any] = []
        self.passed = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                gpu.enqueued.append(self)

            def query(self) -> bool:
                return gpu.enqueued.index(self) < gpu.passed

            def elapsed_time(self, end: Any) -> float:
                assert end.query(), "a time is asked for before it is known"
                return 1e4 * (gpu.enqueued.index(end) - gpu.enqueued.index(self))

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def synchronize(self) -> None:
        self.passed = len(self.enqueued)


def test_on_a_gpu_times_are_those_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    clock = StreamClock()
    spans = [Span("forward", str(k), 0, 0.0, 0.0) for k in range(3)]
    for span, name in product(spans, ("began_s", "ended_s")):
        clock.mark(span, name)
    assert all(x.began_s > 0 and x.ended_s == 0.0 for x in spans), "the host's, and not yet"
    gpu.passed = 4  # the start, the whole first span, and the beginning of the second
    assert not clock.settle(patience_s=0)
    assert spans[0].ended_s - spans[0].began_s == pytest.approx(10)
    assert spans[2].ended_s == 0.0
    gpu.synchronize()
    assert clock.settle(patience_s=0)
    assert [x.ended_s - x.began_s for x in spans] == pytest.approx([10, 10, 10])
    assert spans[2].began_s - spans[0].began_s == pytest.approx(40)


def test_clocks_align_and_nothing_ends_after_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, now_s = FakeGpu(monkeypatch), iter([100.0, 500.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s, 1000.0))
    clock, event = StreamClock(), SimpleNamespace(ended_s=0.0, wait_ended_s=0.0)
    clock.mark(before := SimpleNamespace(), "ended_s")
    clock.align()
    clock.mark(event, "wait_ended_s")
    clock.mark(event, "ended_s")  # as the side stream sees it, later
    gpu.synchronize()
    assert clock.settle()
    assert (before.ended_s, event.ended_s, event.wait_ended_s) == (110, 510, 510)


def test_only_a_step_that_ended_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostClock, "align", aligned := Mock())
    with suppress(KeyError), record(detail_step=0):
        raise KeyError
    aligned.assert_not_called()
    recorded(Loop().step, detail_step=0)
    aligned.assert_called_once()


def train(wrap: Callable[[nn.Module], nn.Module] | None, steps: int = 3) -> Any:
    loop = Loop(wrap)
    for _ in range(steps):
        loop.step()
    return held(loop.model, loop.optimizer)


@pytest.mark.parametrize("wrap", [NaiveDDP, DDP])
def test_all_ranks_of_a_world(world: World, wrap: type) -> None:
    with record(detail_step=1) as trace:
        helds = world.run(train, wrap)
    assert broken_laws(trace) == [] and trace.complete
    assert sorted(trace.ranks) == [0, 1, 2] and trace.steps() == [0, 1, 2]
    assert trace.about["world_size"] == 3 and "problems" not in trace.about
    predicted = wrap.predict(GPT.preset("tiny", vocab=64, context=16), 3)
    for rank, one in trace.step(1).ranks.items():
        for states in (helds[rank], predicted):
            assert one.memory[-1].held_bytes[: OPTIMIZER + 1] == states_of(states)
    sent = sum(e.bus_bytes for one in trace.step(2).ranks.values() for e in one.comms)
    assert sent == 3 * predicted.bus_bytes
    roots = {x.kind for x in trace.ranks[0].spans if x.depth == 0 and x.phase == "forward"}
    assert roots == {wrap.__name__, "loss"}
    names = {x.module for x in trace.ranks[0].spans if x.phase == "forward"}
    assert "blocks.0.mlp.up" in names and not any(name.startswith("module") for name in names)


def test_memory_of_the_communicator_is_its_own_category(world: World) -> None:
    def on_rank() -> list[int]:
        comm, x = Comm(), torch.ones(100, 200)
        with record(detail_step=0) as trace:
            comm.all_reduce(x.t())  # not contiguous: staged
            comm.all_reduce(torch.ones(30_000), op="max", async_op=True).wait()
        return [point.held_bytes[BUFFERS] for point in trace.ranks[comm.rank].memory]

    for buffers in world.run(on_rank):
        assert max(buffers) >= 100 * 200 * 4, "the contiguous copy"
        assert any(0 < n < 80_000 * 2 for n in buffers) and buffers[-1] == 0


def test_overlap_shows_on_a_paced_link() -> None:
    """A bucket's all-reduce is under way while backward goes on; without overlap, none is."""
    with World(2, link=Link(gbps=0.5, latency_us=50)) as world:
        for overlap in (True, False):
            with record() as trace:
                world.run(train, partial(DDP, bucket_mb=0.005, overlap=overlap), 2)
            assert trace.about["link"]["gbps"] == 0.5
            first = trace.step(1).ranks[0]
            (whole,) = [x for x in first.spans if x.phase == "backward" and x.depth == 0]
            last_s = max(x.began_s for x in first.spans if x.phase == "backward")
            assert len(first.comms) > 3 and whole.ended_s
            assert any(event.issued_s < last_s for event in first.comms) == overlap


def test_runs_of_one_block_follow_each_other(world: World, tmp_path: Path) -> None:
    with record(tmp_path / "run", note="twice") as trace:
        world.run(train, None, 2)
        world.run(lambda: Comm().all_reduce(torch.ones(3)))
        world.run(train, None, 1)
    assert broken_laws(trace) == []
    assert trace.steps() == [0, 1, 2, 3]
    assert [len(trace.step(k).ranks[1].comms) for k in trace.steps()] == [0, 0, 1, 0]
    again = read_run(tmp_path / "run")
    assert again == trace and again.about["note"] == "twice"
    raises("already contains a run", record(tmp_path / "run").__enter__)
    with record(tmp_path / "run", replace=True) as trace:
        world.run(train, None, 1)
    assert trace.steps() == [0]


def test_one_block_records_one_run_and_a_mistake_leaves_the_world_alone(world: World) -> None:
    with World(1) as other:
        other.run(lambda: setattr(labkit.attach().state, "kept", 42))
        with record():
            world.run(train, None, 1)
            raises("another world", other.run, train, None, 1, error=RuntimeError)
        assert other.run(lambda: labkit.attach().state.kept) == [42]
    with record():
        Loop().step()
        raises("world.run in a separate block", world.run, train, None, 1, error=RuntimeError)


def test_cells_are_recorded_too_and_outside_the_block_nothing(world: World) -> None:
    with record() as trace:
        world.run_cell("comm.all_reduce(torch.ones(2))", "cell")
    world.run(train, None, 1)
    assert [len(one.comms) for one in trace.ranks.values()] == [1, 1, 1]
    assert world.run(lambda: (Recorder.now is None, len(here.listeners))) == [(True, 0)] * 3


def test_a_hang_leaves_its_story_and_its_step_is_drawn(tmp_path: Path) -> None:
    def hang() -> None:
        train(None, 2)
        Comm().all_reduce(torch.ones(4))
        with labkit.span("evaluation"):
            if Comm().rank == 0:
                time.sleep(60)
            Comm().all_reduce(torch.ones(5))

    with World(3, timeout_s=1.5) as world:
        with pytest.raises(RankError), record(tmp_path / "run") as trace:
            world.run(hang)
        assert not trace.complete and trace.about["problems"]
        for rank in (1, 2):
            done, hung = trace.ranks[rank].comms
            assert done.ended_s and not hung.ended_s and hung.shape == (5,)
        assert len(trace.ranks[0].comms) == 1
        for one in trace.ranks.values():
            (open_span,) = [x for x in one.spans if not x.ended_s]
            assert (open_span.module, open_span.step) == ("evaluation", 2)
            assert not one.steps[-1].ended_s
        assert trace.steps() == [0, 1, 2] and choose_step(trace) == 2
        with record() as after:
            world.run(train, None, 1)
        assert after.complete and broken_laws(after) == []


def test_a_rank_that_dies_leaves_what_it_has_written(world: World, tmp_path: Path) -> None:
    def die() -> None:
        train(None, 3)
        time.sleep(0.8)  # the recorder writes every half second
        if Comm().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        Comm().barrier()

    with pytest.raises(RankError, match="rank 1"), record(tmp_path / "run") as trace:
        world.run(die)
    assert trace.steps()[:3] == [0, 1, 2]
    assert not trace.ranks[1].complete and len(trace.ranks[1].spans) > 100


def test_on_a_rank_itself(world: World, tmp_path: Path) -> None:
    def on_rank(folder: Path | None) -> Trace:
        with record(folder) as trace:
            train(DDP, 2)
        return trace

    for rank, trace in enumerate(world.run(on_rank, None)):
        assert list(trace.ranks) == [rank] and trace.size == 3
        assert trace.steps() == [0, 1] and broken_laws(trace) == []
    world.run(on_rank, tmp_path / "run")
    trace = read_run(tmp_path / "run")
    assert trace.complete and sorted(trace.ranks) == [0, 1, 2] and broken_laws(trace) == []


def test_user_modules_of_every_kind() -> None:
    def forward(self: Any, x: torch.Tensor) -> dict[str, Any]:
        y, (h, c) = self.rnn(x)
        return {"y": self.mlp(y), "state": (h, c), "none": None, "n": 3}

    model = Custom(forward, rnn=nn.LSTM(4, 4, batch_first=True), mlp=MLP([4, 4]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 3, 4))["y"].sum().backward()
        optimizer.step()

    trace = recorded(step, step, detail_step=1)
    assert {"rnn", "mlp.layers.0"} <= {x.module for x in spans_of(trace, "backward", 1)}


def test_other_threads_are_not_mixed_in() -> None:
    other, until = nn.Linear(3, 3), threading.Event()

    def beside() -> None:
        while not until.is_set():
            other(torch.ones(2, 3)).sum().backward()

    thread = threading.Thread(target=beside)
    with record() as trace:
        thread.start()
        train(None, 4)
        until.set()
        thread.join()
    assert broken_laws(trace) == [] and trace.steps() == [0, 1, 2, 3]
    assert len({len(trace.step(k).ranks[0].spans) for k in trace.steps()}) == 1


def test_a_span_around_the_loop_holds_several_steps() -> None:
    with record(detail_step=1) as trace, labkit.span("epoch"):
        train(None, 3)
    assert trace.steps() == [0, 1, 2] and trace.step(1).ranks[0].memory
    assert {x.depth for x in spans_of(trace, "forward", 1) if x.module == ""} == {0}


def test_an_optimizer_step_that_fails_does_not_swallow_the_next() -> None:
    class Fails(torch.optim.SGD):
        fail = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.fail:
                self.fail = False
                raise ValueError("not now")

    model = nn.Linear(2, 2)
    optimizer = Fails(model.parameters(), lr=0.1)
    with record() as trace:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            with suppress(ValueError):
                optimizer.step()
    assert broken_laws(trace) == [] and trace.steps() == [0, 1]


def test_nothing_is_kept_or_recorded_after_the_block() -> None:
    model = Custom(lambda model, n: model.table[:n], table=nn.Parameter(torch.ones(4, 3)))
    inner = nn.Linear(3, 1)
    keep = model(3).sum()
    with record() as trace:
        keep = inner(model(3)).sum()
        keep.backward(retain_graph=True)
        dead = weakref.ref(temporary := nn.Linear(1, 1))
        temporary(torch.ones(1, 1))
        del temporary
        gc.collect()
        assert dead() is None, "a model that nobody has is freed, also in the block"
    count = len(trace.ranks[0].spans)
    keep.backward()
    inner(model(2)).sum().backward()
    assert len(trace.ranks[0].spans) == count


def test_a_model_compiled_inside_the_block() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend="eager")
    trace = recorded(lambda: model(torch.ones(1, 2)).sum().backward())
    assert spans_of(trace, "forward")
    torch.compiler.reset()


def test_metrics_belong_to_the_step_that_has_just_ended(world: World) -> None:
    with record() as trace:
        for k in range(2):
            train(None, 1)
            labkit.metric(loss=torch.tensor(float(k)))
    assert [(x["step"], x["loss"]) for x in trace.metrics] == [(0, 0.0), (1, 1.0)]
    with pytest.raises(ValueError), record():
        labkit.metric(loss=torch.ones(2))
    with record() as trace:
        world.run(train, None, 1)
        labkit.metric(accuracy=0.5)
    assert [x["accuracy"] for x in trace.metrics] == [0.5]


def test_a_folder_that_vanishes_costs_the_record_and_not_the_run(tmp_path: Path) -> None:
    not_written = pytest.warns(UserWarning, match="the rest of this run could not be written")
    with not_written, record(tmp_path / "run") as trace:
        shutil.rmtree(tmp_path / "run")
        train(None, 2)
    assert trace.steps() == [0, 1]


def test_recording_goes_on_while_an_exception_keeps_the_ranks_and_no_longer(world: World) -> None:
    def leave_rank_0_waiting() -> None:
        if Comm().rank:
            raise ValueError("while rank 0 waits")
        Comm().barrier()

    with record() as trace:
        raises("All ranks keep", world.run, lambda: 1 / 0, error=RankError)
        world.run(lambda: Comm().all_reduce(torch.ones(2)))
    assert [len(rank.comms) for rank in trace.ranks.values()] == [1, 1, 1]
    with record():
        raises("while rank 0 waits", world.run, leave_rank_0_waiting, error=RankError)
        with pytest.warns(UserWarning, match="records no more"):
            assert world.run(lambda: 1) == [1, 1, 1]
