"""A dry run does what real ranks do, without data: the same operations, bytes and memory."""

import gc
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from labkit import DDP, GPT, Batch, Comm, RankError, World, cluster, dry_run, record, replay
from labkit.recipes import RECIPES
from labkit.recipes import rows as rows_of
from labkit.replaying import dry_runs
from labkit.trace import Operation, Trace
from labkit.trace.measures import peak_memory
from tables import raises

RANKS = 3


def train(strategy: str = "ddp", steps: int = 3, rows: int = 2, dtype: str = "float32") -> None:
    torch.manual_seed(0)
    model = GPT.preset("tiny").to(getattr(torch, dtype))
    recipe, comm = RECIPES[strategy], Comm()
    wrapped, optimizer = recipe.build(model, comm, 1e-3)
    for _ in range(steps):
        x = torch.randint(0, 256, (rows, 16))
        batch = Batch(x, x, x.numel())
        if recipe.share is not rows_of:  # as many rows on each rank
            batch = recipe.share(batch, comm)
        optimizer.zero_grad()
        recipe.step(wrapped, batch, comm)
        optimizer.step()


def told(trace: Trace) -> list[tuple[object, ...]]:
    """What rank 0 did in step 1, in its order, without times."""
    step, done = trace.step(1).ranks[0], []
    for x in step.spans:
        done.append((x.began_s, ("begin", x.phase, x.module, x.kind, x.flops)))
    for x in step.comms:
        key = (x.op, x.group, x.seq, x.dtype, x.payload_bytes)
        done.append((x.issued_s, ("issue", *key, x.bus_bytes, x.ranks)))
        done.append((x.wait_ended_s, ("waited", *key)))
    for x in step.operations:
        done.append((x.when_s, (x.name, x.dtype, x.flops, x.moved_bytes, x.sides)))
    return [what for _, what in sorted(done, key=lambda x: x[0])]


def both_ways(size: int, *args: Any, **kwargs: Any) -> tuple[Trace, Trace]:
    """`train` recorded on paper and on ranks, which count their operations from the first."""
    with World(size, backend="gloo") as world, record(detail_step=1) as real:
        world.run(train, *args, **kwargs)
    return dry_run(train, *args, ranks=size, as_on="cpu", **kwargs), real


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [name for name, recipe in RECIPES.items() if "pipeline" not in recipe.step.__name__]
)
def test_every_strategy_does_on_paper_what_it_does_on_ranks(strategy: str) -> None:
    """So no strategy reads a tensor's value: it could not be recorded without data."""
    size = 1 if RECIPES[strategy].one_rank else RANKS if RECIPES[strategy].share is rows_of else 2
    dry, real = both_ways(size, strategy)
    assert told(dry) == told(real)
    assert len(dry.ranks[0].operations) > 100
    held, real_held = peak_memory(dry.ranks[0]), peak_memory(real.ranks[0])
    assert held["optimizer state"] > 0
    assert held.pop("other") == pytest.approx(real_held.pop("other"), abs=1024)  # a rank's own
    assert held == real_held


@pytest.mark.slow
def test_the_first_stage_of_a_pipeline_does_on_paper_what_it_does_on_a_rank() -> None:
    """But for when it waits, and torch's own operations that send; what other stages receive is
    told to them, in numbers that paper has not."""
    dry, real = both_ways(2, "pipeline", rows=4)
    other = ("waited", "send", "recv_")
    done = [[x for x in told(trace) if x[0] not in other] for trace in (dry, real)]
    assert done[0] == done[1]
    sends = [event for event in dry.step(1).ranks[0].comms if event.op == "send"]
    assert [event.bus_bytes for event in sends] == [1 * 16 * 12 * 4] * 4
    held, real_held = peak_memory(dry.ranks[0]), peak_memory(real.ranks[0])
    for name in ("parameters", "gradients", "optimizer state"):
        assert held[name] == real_held[name] > 0


def test_one_rank_stands_for_all_and_can_be_drawn_as_any() -> None:
    dry = dry_run(train, ranks=1024)
    assert (dry.size, dry.steps(), dry.ranks[0].alike) == (1024, [1], tuple(range(1, 1024)))
    every = dry.expanded()
    assert len(every.ranks) == 1024 and every.complete
    assert every.ranks[7].spans is dry.ranks[0].spans, "shared, not copied"
    assert [event.rank for event in every.ranks[7].comms] == [7] * len(dry.ranks[0].comms)
    raises("rank 1024 is neither recorded nor represented", dry.expanded, [1024])


def test_ranks_of_several_kinds_each_have_their_record() -> None:
    def work() -> None:
        comm = Comm()
        model = nn.Linear(4, 4 if comm.rank < 2 else 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        comm.all_reduce(torch.ones(5))
        optimizer.step()

    dry = dry_run(work, ranks=4, alike={0: [0, 1], 2: [3]}, step=0)
    assert {rank: one.alike for rank, one in dry.ranks.items()} == {0: (1,), 2: (3,)}
    assert dry.ranks[2].spans[0].flops == 2 * dry.ranks[0].spans[0].flops == 2 * 2 * 16
    replayed = replay(dry, cluster("workstation"))
    assert replayed.ranks[0].comms[0].ended_s == replayed.ranks[2].comms[0].ended_s
    for wrong in ({0: [0, 1]}, {0: range(4), 1: [1]}, {0: range(5)}):
        raises("each of the ranks 0 to 3 once", dry_run, work, ranks=4, alike=wrong, step=0)


def take_steps(model: nn.Module, optimizer: Any, x: torch.Tensor, steps: int = 1) -> None:
    for _ in range(steps):
        model(x).sum().backward()
        optimizer.step()


def test_a_model_of_another_dtype_is_converted_and_stays_tied() -> None:
    def work() -> None:
        model = GPT.preset("tiny").to(torch.bfloat16)
        assert model.head.weight is model.embed.tokens.weight
        assert model.to(torch.bfloat16).head.weight is model.head.weight
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        optimizer = torch.optim.AdamW(model.parameters())
        take_steps(model, optimizer, torch.zeros(1, 8, dtype=torch.long))

    held = peak_memory(dry_run(work, ranks=1, step=0).ranks[0])
    assert held["parameters"] == 2 * GPT.preset("tiny").parameter_count


def test_the_optimizer_is_that_of_a_gpu_unless_asked() -> None:
    def operations(as_on: str) -> list[Operation]:
        rank = dry_run(train, ranks=2, as_on=as_on).ranks[0]
        (step,) = (span for span in rank.spans if span.phase == "optimizer")
        return [x for x in rank.operations if step.began_s < x.when_s < step.ended_s]

    cuda, cpu = operations("cuda"), operations("cpu")
    assert len(cuda) < 30 < 200 < len(cpu)
    assert not any(x.name == "_local_scalar_dense" for x in cpu + cuda)
    moved_bytes = [sum(x.moved_bytes for x in done) for done in (cuda, cpu)]
    assert 0.9 < moved_bytes[0] / moved_bytes[1] < 1.2, "the same is read and written"


def test_an_optimizer_that_was_there_before_the_conversion_keeps_its_parameters() -> None:
    def work() -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        model.to(torch.bfloat16)
        take_steps(model, optimizer, torch.ones(1, 8, dtype=torch.bfloat16), 2)

    held = peak_memory(dry_run(work, ranks=1).ranks[0])
    assert (held["parameters"], held["optimizer state"]) == (2 * 72, 2 * 2 * 72 + 2 * 4)


@pytest.mark.slow
def test_it_leaves_the_process_as_it_was_whose_memory_is_none_of_the_runs() -> None:
    conversion = nn.Module._apply

    def looks() -> None:
        train(steps=1)
        if torch.ones(1).sum() > 0:
            raise AssertionError("there is no data")

    raises("reads the value of a tensor .*loss.item", dry_run, looks, ranks=4)
    raises("", dry_run, lambda: {}["missing"], ranks=4, error=KeyError)
    assert not dist.is_initialized() and nn.Module._apply is conversion
    assert type(torch.ones(1)) is torch.Tensor
    first = dry_run(train, ranks=4)
    of_a_notebook = torch.zeros(1_000_000)  # is not on the GPU that the run is recorded for
    second = dry_run(train, ranks=4)
    assert peak_memory(first.ranks[0]) == peak_memory(second.ranks[0])
    assert gc.get_freeze_count() == 0 and of_a_notebook.numel()
    assert [e.group for e in first.ranks[0].comms] == [e.group for e in second.ranks[0].comms]
    replays = [replay(trace, cluster("selene")) for trace in (first, second)]
    assert replays[0] == replays[1], "to the last digit"
    with World(1) as world:
        raises("already a rank", world.run, lambda: dry_run(train, ranks=4), error=RankError)


def test_what_cannot_be_recorded_is_refused_with_a_reason() -> None:
    def chooses() -> None:
        x = torch.ones(4)
        x[x > 0].sum()

    def two_optimizers() -> None:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
        for _ in range(2):
            take_steps(layers, optimizers[0], torch.ones(1, 4))
            optimizers[1].step()

    raises("reads the value of a tensor .*shapes that depend on values", dry_run, chooses, ranks=2)
    raises("step 1 has no forward pass, .* pass step=2", dry_run, two_optimizers, ranks=2)
    assert dry_run(two_optimizers, ranks=2, step=2).ranks[0].spans
    raises("ran 1 training steps and has no step 1", dry_run, train, steps=1, ranks=2)
    raises("ranks=0; choose at least 1", dry_run, train, ranks=0)


def test_a_model_that_no_laptop_holds() -> None:
    """One layer of 175B parameters as DDP trains it: 1.8 billion in fp32."""
    gpt = partial(GPT, vocab=1024, width=12288, depth=1, heads=96, context=2048)

    def work() -> None:
        model = DDP(gpt())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            take_steps(model, optimizer, torch.zeros(1, 2048, dtype=torch.long))

    dry = dry_run(work, ranks=1024)
    with torch.device("meta"):
        numbers = gpt().parameter_count
    held = peak_memory(dry.ranks[0])
    assert held["parameters"] == 4 * numbers > 7e9
    assert held["optimizer state"] == pytest.approx(8 * numbers, rel=1e-6)
    sent_bytes = sum(event.bus_bytes for event in dry.ranks[0].comms)
    assert sent_bytes == pytest.approx(2 * 1023 / 1024 * 4 * numbers, rel=1e-6)


def test_progress_keeps_what_the_function_prints_on_lines_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dry_runs, "LONG_S", 0.0)
    monkeypatch.setattr(dry_runs, "EVERY_S", 0.0)

    def work() -> None:
        layer = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for step in range(2):
            take_steps(layer, optimizer, torch.ones(1, 2))
            print(f"step {step} is over")

    dry_run(work, ranks=2)
    assert "operations" not in capsys.readouterr().out, "nothing is shown in a file"
    monkeypatch.setattr(dry_runs, "Console", partial(Console, force_terminal=True, width=80))
    dry_run(work, ranks=2)
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", capsys.readouterr().out)
    assert re.search(r"rank 0 of 2, without data: \d+ operations, 0 s", shown)
    for step in range(2):
        assert re.search(rf"^step {step} is over$", shown.replace("\r", "\n"), re.MULTILINE)
