"""A pipeline does what one process does, sends what it must, and keeps no more than it says."""

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipeline_cases as cases
from labkit import Comm, Link, World, listen
from labkit.parallel.paced_stage import PacedStage
from labkit.parallel.pipeline.deferred_weights import deferring, run_later
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.splitting import layers_of, measure_costs, split
from labkit.schedules import parse_schedule
from small_models import difference
from worlds import on_each_rank


@pytest.mark.slow
@pytest.mark.parametrize("names", [["naive", "gpipe", "1f1b"], ["interleaved", "zb-h1", "zb-h2"]])
def test_every_schedule_is_as_one_process(world4: World, names: list[str]) -> None:
    """On 1 to 4 stages, with every admissible number of micro-batches from 1 to 9."""
    for rank, count in enumerate(world4.run(cases.equals_one_process, [1, 2, 3, 4], names)):
        sizes = range(rank + 1, 5)
        assert count == sum(len(cases.admissible(name, n)) for name in names for n in sizes)


ON_THREE_RANKS: list[tuple[Any, ...]] = [
    *((cases.equals_one_process, [3], [name], [m])
      for name, m in (("1f1b", 4), ("interleaved", 3), ("zb-h1", 4))),
    *((cases.a_gpt_with_a_tied_embedding, 3, name, 6) for name in ("1f1b", "interleaved", "zb-h1")),
    (cases.a_gpt_with_a_tied_embedding, 3, "zb-h1", 4, True),
    (cases.a_gpt_with_a_tied_embedding, 2, "1f1b", 3, True),
    (cases.a_gpt_with_a_tied_embedding, 1, "gpipe", 3),
    *((cases.recompute_is_equal_to_the_bit, name) for name in ("1f1b", "zb-h1")),
    *((cases.pipedream_equals_stale_weights, m) for m in (1, 3, 7)),
    *((cases.sends_exactly_its_bytes, name) for name in ("gpipe", "1f1b", "interleaved", "zb-h1")),
    *((cases.frees_activations, name, m)
      for name, m in (("gpipe", 6), ("1f1b", 7), ("interleaved", 6), ("zb-h1", 5))),
    *((cases.frees_what_is_saved, name, m)
      for name, m in (("gpipe", 6), ("1f1b", 7), ("zb-h1", 7), ("zb-h2", 7))),
    (cases.outputs_go_when_they_are_sent,),
    (cases.sends_overlap_compute,),
    (cases.does_not_wait_for_sends,),
]  # fmt: skip


@pytest.mark.parametrize(
    "check", ON_THREE_RANKS, ids=lambda check: "-".join([check[0].__name__, *map(str, check[1:])])
)
def test_a_pipeline_keeps_its_promises(world3: World, check: tuple[Any, ...]) -> None:
    world3.run(*check)


def test_owners_in_a_part_of_the_world_sum_without_a_group(world4: World) -> None:
    """As in a mesh, whose line of 3 ranks cannot make a group of 2."""
    world4.run(cases.a_gpt_with_a_tied_embedding, 3)


def tied_on_three(name: str, m: int) -> tuple[Pipeline, Tensor, Tensor]:
    torch.manual_seed(4)
    x, y = torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4, 5))
    return Pipeline(split(cases.gpt(), 3), Comm(), name, m, cases.tokens_loss), x, y


@on_each_rank("world3")
def test_gradients_add_up_over_steps() -> None:
    pipe, x, y = tied_on_three("1f1b", 4)
    pipe.step(x, y)
    once = [p.grad.clone() for p in pipe.parameters()]
    pipe.step(x, y)
    for p, g in zip(pipe.parameters(), once, strict=True):
        assert (p.grad - 2 * g).abs().max().item() < 1e-14


@on_each_rank("world3")
def test_without_gradients_a_step_evaluates() -> None:
    pipe, x, y = tied_on_three("zb-h1", 3)
    trained = pipe.step(x, y)
    before = [p.grad.clone() for p in pipe.parameters()]
    with torch.no_grad(), listen() as events:
        loss = pipe.step(x, y)
    assert not any(e.tag == 102 or e.op == "all_reduce" for e in events)
    assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), before, strict=True))
    assert difference(pipe.full_state_dict(), cases.gpt().state_dict()) == 0
    assert trained == loss and (loss is None) == (Comm().rank < 2)


@pytest.mark.parametrize("own", ["gpipe of one's own", "halves and wholes", "chunks"])
def test_a_users_own_schedule(world3: World, own: str) -> None:
    text = {
        "gpipe of one's own": """
            F1 F0 B0 B1
            F1 F0 B0 B1
            F1 F0 B0 B1""",
        "halves and wholes": """
            F0 F1 F2 I0 B1 I2 W2 W0
            F0 F1 F2 B0 I1 B2 W1
            F0 I0 F1 W0 B1 F2 B2""",
        "chunks": """
            F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1
            F0 F1 F0.1 F1.1 I0.1 I1.1 B0 W0.1 B1 W1.1
            F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1""",
    }[own]
    world3.run(cases.own_schedule, parse_schedule(text))


@on_each_rank("world3")
def test_bf16_travels_as_bf16() -> None:
    comm = Comm()
    x, y = (one.bfloat16() for one in cases.batch(rows=6))
    whole = nn.Sequential(*cases.layers(3)).bfloat16()
    F.mse_loss(whole(x), y).backward()
    pipe = Pipeline([one.bfloat16() for one in cases.layers(3)], comm, "zb-h1", 3, F.mse_loss)
    with listen() as events:
        pipe.step(x, y)
    sizes = {e.bus_bytes for e in events if e.op == "send" and e.tag != 103}
    assert sizes == {2 * 2 * 3 * 2} and {p.dtype for p in pipe.parameters()} == {x.dtype}
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in pipe.module.named_parameters():
        assert (p.grad - expected[name]).norm() < 0.03 * expected[name].norm(), name


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_replicas_synchronise_once_in_a_step(world4: World, name: str) -> None:
    world4.run(cases.replicas_synchronise_once, name)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"backend": "gloo"}, {"link": Link(gbps=1.0, latency_us=300)}])
def test_other_transports_carry_it_too(how: dict[str, Any]) -> None:
    with World(3, timeout_s=20, **how) as world:
        world.run(cases.equals_one_process, [3], ["1f1b", "interleaved", "zb-h1"], ms=[3])


@on_each_rank("world3")
def test_shapes_are_sent_again_when_they_change() -> None:
    """Another width of the rest, then another type: told once each; the rows alone change none."""
    pipe = Pipeline([nn.Tanh() for _ in range(3)], Comm(), "gpipe", 2, F.mse_loss)
    counts = []
    for x in (torch.ones(4, 3), torch.ones(5, 3), torch.ones(4, 2, 3), torch.ones(4, 3).half()):
        with listen() as events:
            pipe.step(x, x)
        counts.append(sum(e.op == "send" and e.tag == 103 for e in events))
    assert counts == ([1, 0, 1, 1] if Comm().rank < 2 else [0, 0, 0, 0])


def test_split_cuts_a_gpt_under_its_own_names() -> None:
    model = cases.gpt(5)
    parts = split(model, 3)
    names = [[name for name, _ in part.named_children()] for part in parts]
    assert names == [["embed", "blocks"], ["blocks"], ["blocks", "norm", "head"]]
    assert [list(part.blocks._modules) for part in parts] == [["0", "1"], ["2", "3"], ["4"]]
    whole = dict(model.named_parameters(remove_duplicate=False))
    for part in parts:
        assert all(p is whole[name] for name, p in part.named_parameters())
    tokens = torch.randint(0, 11, (2, 5))
    x: Any = tokens
    for part in parts:
        x = part(x)
    assert torch.equal(x, model(tokens))


def test_split_by_cost_makes_the_dearest_stage_cheap() -> None:
    model = cases.gpt(4)
    costs = [0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 3.0]  # a dear head
    parts = split(model, 2, costs)
    assert [len(part.layers) for part in parts] == [5, 2]
    even = split(nn.Sequential(*cases.layers(7)), 3)
    assert [list(part.layers) for part in even] == [["0", "1", "2"], ["3", "4"], ["5", "6"]]
    assert [len(part.layers) for part in split(cases.layers(3), 3)] == [1, 1, 1]


def test_measured_costs_see_a_dear_layer() -> None:
    stages = [PacedStage(0.0), PacedStage(0.05), PacedStage(0.0)]
    costs = measure_costs(stages, torch.ones(2, 8))
    assert costs[1] > 5 * max(costs[0], costs[2]) and costs[1] >= 0.15
    assert all(p.grad is None for one in stages for p in one.parameters())
    assert [len(part.layers) for part in split(stages, 2, [1, 9, 1])] in ([2, 1], [1, 2])
    assert list(layers_of(cases.gpt(1))) == ["embed", "blocks.0", "norm", "head"]


@pytest.mark.parametrize(
    "kind", ["plain", "frozen weight", "frozen bias", "shared", "no input", "autocast"]
)
def test_the_halves_of_backward_are_the_whole(kind: str) -> None:
    """Weights have no gradient after the first half, and all of it after the second."""

    dtype = torch.float32 if kind == "autocast" else torch.float64

    def run(halves: bool) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        linear, later = nn.Linear(4, 4), []
        if kind.startswith("frozen"):
            getattr(linear, kind.split()[1]).requires_grad_(False)
        middle = [nn.GELU(), linear] if kind == "shared" else [nn.LayerNorm(4), nn.Tanh()]
        module = nn.Sequential(linear, *middle, nn.Linear(4, 3)).to(dtype)
        x = torch.randn(5, 2, 4, dtype=dtype).requires_grad_(kind != "no input")
        cast = torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")
        with deferring(module, later) if halves else nullcontext(), cast:
            y = module(x)
        y.pow(2).sum().backward()
        between = [p.grad for p in module.parameters()]
        hooked: list[bool] = []
        for p in module.parameters():
            if p.requires_grad:  # (a hook that kept its parameter would keep it for good)
                p.register_post_accumulate_grad_hook(lambda _: hooked.append(True))
        run_later(later)
        assert later == [] and bool(hooked) == halves
        return x.grad, [p.grad for p in module.parameters()], between

    dx, expected, _ = run(False)
    other, gradients, between = run(True)
    assert (dx is None and other is None) or torch.allclose(dx, other, rtol=1e-13)
    assert between[-1] is None and between[-2] is None
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)


def test_only_plain_linear_layers_are_deferred() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    later: list[Any] = []
    with deferring(normed, later):
        normed(torch.ones(1, 3)).sum().backward()
    assert later == [] and all(p.grad is not None for p in normed.parameters())


def test_a_paced_stage_takes_its_time_and_computes() -> None:
    stage, later = PacedStage(0.01, input_s=0.02, weight_s=0.03, width=2), []
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    spans = []

    def timed(run: Any) -> Tensor | None:
        began_s = time.monotonic()
        result = run()
        spans.append(time.monotonic() - began_s)
        return result

    with deferring(stage, later):
        y = timed(lambda: stage(x))
    assert y is not None and torch.equal(y, x)
    timed(lambda: y.backward(torch.ones(2, 2)))
    assert stage.weight.grad is None and torch.equal(x.grad, torch.ones(2, 2))
    timed(lambda: run_later(later))
    assert torch.equal(stage.weight.grad, torch.tensor([4.0, 6.0]))
    assert all(took >= told for took, told in zip(spans, [0.01, 0.02, 0.03], strict=True))
    timed(lambda: stage(x).sum().backward())
    assert spans[-1] >= 0.06 and PacedStage(0.5).backward_s == 1.0
    assert "paced" in repr(stage)
