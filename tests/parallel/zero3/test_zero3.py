"""ZeRO-3: single-process training, the formula's bytes, gathered just before use, freed at once."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from data_parallel_contract import LENGTH, MODELS, OPTIMIZERS, ROWS, Strategy, check_equal_to_single
from labkit import GPT, Comm, Text, World, ZeRO3, listen, loss
from labkit.parallel.common.held import held
from small_models import Custom, difference
from tables import raises
from worlds import on_each_rank, world_fixture

slow = pytest.mark.slow
SIZES = [n if n == 2 else pytest.param(n, marks=slow) for n in (1, 2, 3, 4)]
NAMES = [name if name == "adamw" else pytest.param(name, marks=slow) for name in OPTIMIZERS]
world = world_fixture(sizes=SIZES, timeout_s=20)


def zero3(wrap: Any = ZeRO3, sharded: bool = True, **options: Any) -> Strategy:
    """ZeRO-3 for the contract. A unit used twice is gathered more often than the formula says."""
    return Strategy(
        lambda module: wrap(module, **options),
        predict=lambda module, size, rank: ZeRO3.predict(
            module, size, options.get("units"), options.get("persist_below", 0)
        ),
        sharded=("parameter_bytes", "gradient_bytes", "optimizer_bytes") if sharded else None,
        weights=lambda model, module: getattr(model, "full_state_dict", module.state_dict)(),
        bytes_of=("gpt",),
        mean=True,
        first_agrees=False,
    )


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("optimizer", NAMES)
def test_weights_equal_single_process_training(world: World, case: str, optimizer: str) -> None:
    runs = check_equal_to_single(world, zero3(), case, optimizer)
    assert len({run.sent_bytes for run in runs}) == 1, "a rank sends as much as any other"


@slow
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize(
    "options",
    [{"prefetch": 0}, {"prefetch": 3}, {"units": lambda _: True}, {"persist_below": 50}],
    ids=["no prefetch", "far ahead", "one unit", "small ones whole"],
)
def test_every_setting_trains_the_same(world2: World, options: dict[str, Any], case: str) -> None:
    check_equal_to_single(world2, zero3(sharded="persist_below" not in options, **options), case)


def off(model: ZeRO3, reference: nn.Module) -> float:
    """How far the gradients of this rank's pieces are from those of a whole model."""
    whole = dict(reference.named_parameters())
    mine, theirs = {}, {}
    for i, piece in enumerate(model.owned()):
        if (grad := piece.tensor.grad) is not None:
            mine[f"{piece.name}, piece {i}"] = grad.reshape(-1)
        if (grad := whole[piece.name].grad) is not None:
            stop = piece.start + piece.tensor.numel()
            theirs[f"{piece.name}, piece {i}"] = grad.reshape(-1)[piece.start : stop]
    return difference(mine, theirs)


def twins(module: nn.Module, **options: Any) -> tuple[ZeRO3, nn.Module]:
    reference = copy.deepcopy(module)
    return ZeRO3(module, **options), reference


def check_passes(model: ZeRO3, reference: nn.Module, x: torch.Tensor, batch_dim: int = 0) -> int:
    """Gradients of this rank's rows `x[rank]` and of all rows agree; the bytes of the last pass."""
    for _ in range(3):
        model.zero_grad(), reference.zero_grad()
        with listen() as events:
            model(x[Comm().rank]).square().mean().backward()
        reference(torch.cat(list(x), batch_dim)).square().mean().backward()
        assert off(model, reference) < 1e-12
    return sum(event.bus_bytes for event in events)


def inner(again: bool) -> nn.Module:
    def mlp(block: Any, x: torch.Tensor) -> torch.Tensor:
        return block.down(torch.tanh(block.up(x)))

    def forward(block: Any, x: torch.Tensor) -> Any:
        return x + (checkpoint(mlp, block, x, use_reentrant=False) if again else mlp(block, x))

    return Custom(forward, up=nn.Linear(6, 9), down=nn.Linear(9, 6))


def deep(how: str) -> nn.Module:
    """Blocks that are computed again in backward, inside and around, in several ways."""

    def forward(model: Any, x: torch.Tensor) -> Any:
        x = model.first(x)
        if how == "segment":  # two blocks and what is behind them in one
            x = checkpoint(lambda x: torch.relu(model.b(model.a(x))), x, use_reentrant=False)
            return model.last(model.c(x))
        for block in (model.a, model.b, model.c):
            x = checkpoint(block, x, use_reentrant=False) if how == "around" else block(x)
        return model.last(x)

    torch.manual_seed(0)
    blocks = {name: inner(how == "inside") for name in "abc"}
    return Custom(forward, first=nn.Linear(4, 6), **blocks, last=nn.Linear(6, 1)).double()


@pytest.mark.parametrize("how", ["around", "inside", "segment", "not"])
@on_each_rank("world2")
def test_activations_may_be_computed_again(how: str) -> None:
    predicted = ZeRO3.predict(deep(how), 2)
    sent = check_passes(*twins(deep(how)), torch.randn(2, 5, 4, dtype=torch.float64))
    assert sent == predicted.bus_bytes, "a unit is gathered once in forward and once in backward"


@on_each_rank("world2")
def test_passes_in_any_order_add_up_as_in_one_process() -> None:
    torch.manual_seed(0)
    model, reference = twins(MODELS["awkward"]().double())
    every = [Text().batch(i, 4, 8) for i in range(4)]
    mine = [batch.slice(Comm().rank, 2) for batch in every]
    for wrapped, batches in ((model, mine), (reference, every)):
        sum(loss(wrapped(one.x), one) for one in batches[:2]).backward()
        with torch.no_grad():
            wrapped(batches[2].x)
        wrapped.eval()
        wrapped(batches[2].x)  # a graph that has no backward
        wrapped.train()
        loss(wrapped(batches[2].x), batches[2]).backward()
        wrapped.zero_grad(set_to_none=False)
        loss(wrapped(batches[3].x), batches[3]).backward()
    assert off(model, reference) < 1e-12


@on_each_rank("world2")
def test_errors_leave_a_model_that_trains_on() -> None:
    model, reference = twins(deep("not"))
    x = torch.randn(2, 5, 4, dtype=torch.float64)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    def step(**how: Any) -> None:
        model(x[Comm().rank]).square().mean().backward(**how)

    step()
    raises("create_graph=True needs a graph of the backward", step, create_graph=True)
    for failing in (fail, lambda _, args: args[0].register_hook(fail) and None):  # in backward
        hook = model.module.b.down.register_forward_pre_hook(failing)
        raises("on purpose", step, error=RuntimeError)
        hook.remove()
        for change in (1.0, 0.0):
            state = {n: x + change for n, x in reference.state_dict().items()}
            model.load_full_state_dict(state)
            assert difference(model.full_state_dict(), state) == 0
    check_passes(model, reference, x)


@on_each_rank("world2")
def test_outputs_of_any_nesting_recurrent_layers_and_attention() -> None:
    def nested(part: Any, x: torch.Tensor) -> dict[str, Any]:
        return {"all": (part.a(x), [part.b(x)]), "none": None}

    def mixed(model: Any, x: torch.Tensor) -> torch.Tensor:
        found = model.parts[0](x)
        y, _ = model.lstm(found["all"][0] + found["all"][1][0])
        return model.attention(y, y, y)[0]

    torch.manual_seed(0)
    parts = nn.ModuleList([Custom(nested, a=nn.Linear(3, 3), b=nn.Linear(3, 3))])
    lstm, attention = nn.LSTM(3, 4), nn.MultiheadAttention(4, 2)
    model = Custom(mixed, parts=parts, lstm=lstm, attention=attention).double()
    x = torch.randn(2, 5, 4, 3, dtype=torch.float64)  # [rank, s, b, w]
    check_passes(*twins(model), x, batch_dim=1)


@pytest.mark.parametrize("which", ["all", "aside"])
@on_each_rank("world2")
def test_a_loss_that_a_layer_keeps_aside_finds_the_weights(which: str) -> None:
    """As a router of experts does: what it computed is on the layer, not in its output."""

    def keeps(layer: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer.linear(x)
        layer.aside = (layer.linear(torch.tanh(y)) ** 2).mean()
        return y

    torch.manual_seed(0)
    layers = [Custom(keeps, linear=nn.Linear(4, 4)).double() for _ in range(2)]
    model, reference = twins(nn.Sequential(*layers))
    x = torch.randn(3, 4).double()
    for wrapped, (first, second) in ((model, layers), (reference, reference)):
        value = wrapped(x).sum()
        {"all": value + first.aside + second.aside, "aside": first.aside}[which].backward()
    assert off(model, reference) < 1e-12


@on_each_rank("world2")
def test_a_frozen_part_is_sharded_and_its_gradient_does_not_travel() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    module[1].requires_grad_(False)
    model = ZeRO3(module)
    with listen() as events:
        model(torch.ones(1, 4)).sum().backward()
    assert all(p.grad is None for n, p in model.named_parameters() if n.startswith("1."))
    ops = [e.op for e in events]
    assert (ops.count("all_gather"), ops.count("reduce_scatter")) == (6, 2)
    held_by_each = Comm().all_gather_object(sum(p.numel() for p in model.parameters()))
    assert sum(held_by_each) == 20 + 20 + 10


@on_each_rank("world2")
def test_gathered_units_are_freed_and_never_more_than_two() -> None:
    for prefetch, units in ((0, 1), (1, 2), (2, 3)):
        module = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)])
        model = ZeRO3(module, prefetch=prefetch)
        for _ in range(3):
            model(torch.ones(1, 8)).sum().backward()
        assert (model.gathered_bytes, model.peak_gathered_bytes) == (0, units * 64 * 4)
        assert [p.shape for p in module.parameters()] == [(32,)] * 6


@on_each_rank("world2")
def test_parameters_kept_whole_do_not_count_as_gathered() -> None:
    model = ZeRO3(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), persist_below=1000)
    with listen() as events:
        model(torch.ones(1, 8)).sum().backward()
    assert model.peak_gathered_bytes == 0 and {event.op for event in events} == {"all_reduce"}


@on_each_rank("world2")
def test_gathers_leave_ahead_and_gradients_while_backward_runs() -> None:
    def run(prefetch: int) -> tuple[list[str], list[str]]:
        happened: list[tuple[float, str]] = []

        def compute(layer: Any, x: torch.Tensor) -> Any:
            happened.append((time.monotonic(), "compute"))
            x.register_hook(lambda _: happened.append((time.monotonic(), "made")))
            return layer.linear(x)

        layers = [Custom(compute, linear=nn.Linear(8, 8, bias=False)) for _ in range(3)]
        model = ZeRO3(nn.Sequential(*layers), prefetch=prefetch, units=Custom)
        for _ in range(2):
            happened.clear()
            x = torch.ones(1, 8, requires_grad=True)
            with listen() as events:
                y = model(x)
                half_s = time.monotonic()
                y.sum().backward()
        happened += [(event.issued_s, event.op) for event in events]
        forward = [what for when_s, what in sorted(happened) if when_s < half_s]
        return forward, [what for when_s, what in sorted(happened) if when_s > half_s]

    gather, compute, made, reduce = "all_gather", "compute", "made", "reduce_scatter"
    forward, backward = run(0)
    assert forward == [gather, compute] * 3
    assert backward[:-2] == [gather, reduce, gather, made, reduce, gather, made]
    assert sorted(backward[-2:]) == [made, reduce]  # of the first layer, in any order
    forward, backward = run(1)
    assert forward == [gather, gather, compute, gather, compute, compute]
    assert backward[:-2] == [gather, gather, reduce, gather, made, reduce, made]


@on_each_rank("world2")
def test_compute_in_16_bits_with_masters_in_32() -> None:
    losses: dict[torch.dtype, list[float]] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        module = GPT.preset("tiny")
        promised = [
            ZeRO3.predict(module, 2, compute_dtype=t).bus_bytes for t in (torch.float32, dtype)
        ]
        model = ZeRO3(module, compute_dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen, text, losses[dtype] = set(), Text(), []
        module.head.register_forward_pre_hook(lambda m, _, seen=seen: seen.add(m.weight.dtype))
        for step in range(10):
            batch = text.batch(step, ROWS, LENGTH).slice(Comm().rank, 2)
            optimizer.zero_grad()
            with listen() as events:
                value = loss(model(batch.x).float(), batch)
                value.backward()
            optimizer.step()
            losses[dtype].append(value.item())
        assert {p.dtype for p in model.parameters()} == {torch.float32} and seen == {dtype}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        assert losses[dtype] == pytest.approx(losses[torch.float32], rel=0.02)
        sent = sum(event.bus_bytes for event in events)
        assert sent == promised[1] == promised[0] * dtype.itemsize / 4
        held_by_each = Comm().all_gather_object(held(model, optimizer).parameter_bytes)
        assert sum(held_by_each) == 4 * GPT.preset("tiny").parameter_count


def layer() -> nn.Module:
    return nn.Linear(8, 8)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "Adapter": lambda: Custom(  # LoRA: a frozen matrix beside two small ones that are trained
        lambda m, x: torch.tanh(m.base(x) + m.up(m.down(x))), base=layer().requires_grad_(False),
        down=nn.Linear(8, 2, bias=False), up=nn.Linear(2, 8, bias=False)),
    "FrozenNorm": lambda: Custom(
        lambda m, x: x + torch.tanh(m.layer(m.norm(x))),
        norm=nn.LayerNorm(8).requires_grad_(False), layer=layer()),
    "FrozenScale": lambda: Custom(
        lambda m, x: torch.tanh(m.layer(x * m.scale)),
        scale=nn.Parameter(torch.rand(8), requires_grad=False), layer=layer()),
    "OneUnused": lambda: Custom(
        lambda m, x: torch.tanh(m.layer(x)), layer=layer(), unused=nn.Parameter(torch.zeros(3))),
    # It overwrites its input.
    "AllTrained": lambda: Custom(lambda m, x: m.layer(x.mul_(0.5).clone()), layer=layer()),
    "AllFrozen": lambda: layer().requires_grad_(False),
}  # fmt: skip


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("block", BLOCKS)
@on_each_rank("world2")
def test_a_unit_is_freed_when_backward_is_through_with_it(block: str, again: bool) -> None:
    """Not while a frozen weight is still needed, nor late where a parameter gets no gradient."""
    if block == "AllTrained" and again:
        return  # what is overwritten cannot be computed again

    def forward(model: Any, x: torch.Tensor) -> Any:
        x = model.first(x)
        for part in model.blocks:
            x = checkpoint(part, x, use_reentrant=False) if again else part(x)
        return x

    torch.manual_seed(0)
    blocks = nn.ModuleList(BLOCKS[block]() for _ in range(5))
    module = Custom(forward, first=layer(), blocks=blocks).double()
    predicted = ZeRO3.predict(module, 2)
    model, reference = twins(module)
    unit_bytes = max(sum(f.full.nbytes for f in unit.flats) for unit in model.units)
    model.peak_gathered_bytes = 0
    sent = check_passes(model, reference, torch.randn(2, 5, 8, dtype=torch.float64))
    assert sent == predicted.bus_bytes and 0 < model.peak_gathered_bytes <= 2 * unit_bytes


@on_each_rank("world2")
def test_whole_state_comes_out_and_goes_in() -> None:
    torch.manual_seed(Comm().rank)
    start = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    start[2].weight = nn.Parameter(start[0].weight.detach().t().contiguous())
    model = ZeRO3(copy.deepcopy(start))
    state, is_first = model.full_state_dict(), Comm().rank == 0
    assert not is_first or difference(state, start.state_dict()) == 0
    assert model.full_state_dict(rank0_only=True).keys() == (state.keys() if is_first else set())
    other = {name: torch.randn_like(x) if x.is_floating_point() else x + 1
             for name, x in state.items()}  # fmt: skip
    model.load_full_state_dict(other if is_first else None)
    loaded = model.full_state_dict()
    assert not is_first or difference(loaded, other) == 0
    model.load_full_state_dict(state)
    assert difference(model.full_state_dict(), state) == 0


@on_each_rank("world2")
def test_a_state_that_does_not_fit_is_refused_on_every_rank() -> None:
    model = ZeRO3(nn.Linear(3, 2))
    good = model.full_state_dict()
    for bad, words in (
        ({"weight": good["weight"]}, "bias is missing"),
        ({**good, "more": good["bias"]}, "the model has no more; load the state"),
        ({**good, "bias": good["weight"]}, "bias is [2, 3] in the state and [2] in the model"),
    ):
        raises((words,), model.load_full_state_dict, bad if Comm().rank == 0 else None)


@on_each_rank("world2")
def test_misuse_is_refused_by_name_on_every_rank() -> None:
    blocks = nn.Sequential(inner(False), inner(False))
    model, frozen = ZeRO3(blocks), ZeRO3(nn.Linear(2, 2))
    frozen.module.weight.requires_grad_(False)
    with torch.device("meta"):
        nowhere = nn.Linear(2, 2)
    for call, words in (
        (lambda: ZeRO3(blocks), "0.up.weight already belongs to a ZeRO3"),
        (lambda: blocks[0].up(torch.ones(1, 6)), "0.up.weight is sharded"),
        (lambda: frozen(torch.ones(1, 2)), "weight was frozen"),
        (lambda: ZeRO3(nowhere), "weight is on the meta device"),
        (lambda: ZeRO3(nn.Linear(2, 2), prefetch=-1), "prefetch=-1"),
        (lambda: model.to(torch.float64), "wrap it"),
    ):
        raises((words,), call)


class NeedsArguments(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)


@on_each_rank("world2")
def test_optimizers_that_do_not_fit_shards_are_refused() -> None:
    model, scaler = ZeRO3(nn.Linear(4, 4)), torch.amp.GradScaler("cpu")

    def step(optimizer: Any) -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    def scaled_step() -> None:
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    before = model.full_state_dict()
    raises("Adafactor cannot be sharded", step, torch.optim.Adafactor(model.parameters()))
    assert difference(model.full_state_dict(), before) == 0
    step(torch.optim.Adafactor(nn.Linear(2, 2).parameters()))  # not on its shards
    step(NeedsArguments(model.parameters(), 0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaled_step()
    raises(("only this rank's shards", "use labkit.GradScaler"), scaled_step)
