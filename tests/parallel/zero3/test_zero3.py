"""ZeRO-3: equal to single-process training, a share of everything held, bytes as the formula says,
gathered just before use and freed at once, also under recompute."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from data_parallel_contract import LENGTH, MODELS, ROWS, STEPS
from labkit import GPT, Comm, RankError, Text, World, ZeRO3, listen, loss
from labkit.parallel.common.held import held
from worlds import on_each_rank, world_fixture
from zero3_contract import OPTIMIZERS, check_zero3

SIZES = [n if n == 2 else pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4)]
HOW = [name if name == "adamw" else pytest.param(name, marks=pytest.mark.slow)
       for name in OPTIMIZERS]  # fmt: skip


world = world_fixture(sizes=SIZES, timeout_s=20)


def no_prefetch(module: nn.Module) -> ZeRO3:
    return ZeRO3(module, prefetch=0)


def far_ahead(module: nn.Module) -> ZeRO3:
    return ZeRO3(module, prefetch=3)


def one_unit(module: nn.Module) -> ZeRO3:
    return ZeRO3(module, units=lambda _: True)


def small_ones_whole(module: nn.Module) -> ZeRO3:
    return ZeRO3(module, persist_below=50)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("optimizer", HOW)
def test_weights_equal_single_process_training(world: World, case: str, optimizer: str) -> None:
    check_zero3(world, ZeRO3, case, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("wrap", [no_prefetch, far_ahead, one_unit, small_ones_whole])
def test_every_setting_trains_the_same(
    world2: World, wrap: Callable[[nn.Module], ZeRO3], case: str
) -> None:
    check_zero3(world2, wrap, case, "adamw", formula=False)


class Deep(nn.Module):
    """Blocks that are computed again in backward, inside and around, in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Inner(how == "inside") for _ in range(3))
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.how == "segment":  # two blocks and what is behind them in one
            x = checkpoint(self._two, x, use_reentrant=False)
            return self.last(self.blocks[2](x))  # type: ignore[no-any-return]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.how == "around" else block(x)
        return self.last(x)  # type: ignore[no-any-return]

    def _two(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.blocks[1](self.blocks[0](x)))


class Inner(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            return x + checkpoint(self._mlp, x, use_reentrant=False)  # type: ignore[no-any-return]
        return x + self._mlp(x)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["around", "inside", "segment", "not"])
@on_each_rank("world2")
def test_activations_may_be_computed_again(how: str) -> None:
    torch.manual_seed(0)
    module = Deep(how).double()
    reference, predicted = copy.deepcopy(module), ZeRO3.predict(module, 2)
    model = ZeRO3(module)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        with listen() as events:
            model(x[Comm().rank]).square().mean().backward()
        reference(x.flatten(0, 1)).square().mean().backward()
    sent = sum(event.bus_bytes for event in events)
    worst = off(model, reference)
    predicted = int(predicted.bus_bytes)
    assert worst < 1e-12
    assert sent == predicted, "a unit is gathered once in forward and once in backward"


def off(model: ZeRO3, reference: nn.Module) -> float:
    """How far the gradients of this rank's pieces are from those of a whole model."""
    whole = dict(reference.named_parameters())
    worst = 0.0
    for piece in model.owned():
        expected = whole[piece.name].grad
        if expected is None:
            assert piece.tensor.grad is None, piece.name
            continue
        assert piece.tensor.grad is not None, piece.name
        part = expected.reshape(-1)[piece.start : piece.start + piece.tensor.numel()]
        worst = max(worst, float((piece.tensor.grad.reshape(-1) - part).abs().max()))
    return worst


@on_each_rank("world2")
def test_passes_in_any_order_add_up_as_in_one_process() -> None:
    torch.manual_seed(0)
    module = MODELS["awkward"]().double()
    reference, model = copy.deepcopy(module), None
    model = ZeRO3(module)
    text = Text()
    mine = [text.batch(i, 4, 8).slice(Comm().rank, 2) for i in range(4)]
    every = [text.batch(i, 4, 8) for i in range(4)]
    for wrapped, batches in ((model, mine), (reference, every)):
        sum(loss(wrapped(one.x), one) for one in batches[:2]).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            wrapped(batches[2].x)
        wrapped.eval()
        wrapped(batches[2].x)  # a graph that has no backward
        wrapped.train()
        loss(wrapped(batches[2].x), batches[2]).backward()
        wrapped.zero_grad(set_to_none=False)
        loss(wrapped(batches[3].x), batches[3]).backward()
    assert off(model, reference) < 1e-12


class Branching(nn.Module):
    """In one unit: `some` is used by rank 0 alone, `nobody` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.some, self.nobody = (nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x: torch.Tensor, deep: bool) -> torch.Tensor:
        x = self.always(x)
        return self.some(x) if deep else x  # type: ignore[no-any-return]


@pytest.mark.parametrize("persist_below", [0, 100])
@on_each_rank("world2")
def test_unused_parameters_are_averaged_where_used_and_left_alone_where_not(
    persist_below: int,
) -> None:
    torch.manual_seed(0)
    model = ZeRO3(Branching(), units=Branching, persist_below=persist_below)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 3, dtype=torch.float64), deep=Comm().rank == 0).sum().backward()
    found = {n: None if p.grad is None else p.grad.tolist() for n, p in model.named_parameters()}
    for name, gradient in found.items():
        assert (gradient is None) == name.startswith("nobody"), name
    if "some.bias" in found:
        assert found["some.bias"] == [1.0] * 3  # 2 / 2 ranks


def test_a_frozen_part_is_sharded_and_its_gradient_does_not_travel(world2: World) -> None:
    def run() -> tuple[list[str], int, int]:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        module[1].requires_grad_(False)
        model = ZeRO3(module)
        with listen() as events:
            model(torch.ones(1, 4)).sum().backward()
        assert all(p.grad is None for n, p in model.named_parameters() if n.startswith("1."))
        return [e.op for e in events], sum(p.numel() for p in model.parameters()), (20 + 20 + 10)

    found = world2.run(run)
    for ops, _, _ in found:
        assert (ops.count("all_gather"), ops.count("reduce_scatter")) == (6, 2)
    assert sum(numbers for _, numbers, _ in found) == found[0][2]


def test_what_is_gathered_is_freed_and_never_more_than_two_units(world2: World) -> None:
    def run(prefetch: int) -> tuple[int, int, list[int], bool]:
        module = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)])
        model = ZeRO3(module, prefetch=prefetch)
        for _ in range(3):
            model(torch.ones(1, 8)).sum().backward()
        shapes = [p.numel() for p in module.parameters()]
        whole = any(isinstance(x, torch.Tensor) and x.shape == (8, 8) for x in module.parameters())
        return model.gathered_bytes, model.peak_gathered_bytes, shapes, whole

    for prefetch, units in ((0, 1), (1, 2), (2, 3)):
        for now, peak, shapes, whole in world2.run(run, prefetch):
            assert (now, peak) == (0, units * 64 * 4)
            assert shapes == [32] * 6 and not whole


@on_each_rank("world2")
def test_what_is_kept_whole_does_not_count_as_gathered() -> None:
    model = ZeRO3(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), persist_below=1000)
    with listen() as events:
        model(torch.ones(1, 8)).sum().backward()
    peak_bytes = model.peak_gathered_bytes
    ops = [event.op for event in events]
    assert peak_bytes == 0 and set(ops) == {"all_reduce"}


def test_gathers_leave_ahead_and_gradients_while_backward_runs(world2: World) -> None:
    """In the order of events: the gather of the next unit is asked for before this one computes."""

    def run(prefetch: int) -> tuple[list[str], list[str]]:
        told: list[tuple[float, str]] = []

        class Layer(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                told.append((time.monotonic(), "compute"))
                x.register_hook(lambda _: told.append((time.monotonic(), "made")))
                return super().forward(x)

        model = ZeRO3(
            nn.Sequential(*[Layer(8, 8, bias=False) for _ in range(3)]), prefetch=prefetch
        )
        for _ in range(2):
            told.clear()
            x = torch.ones(1, 8, requires_grad=True)
            with listen() as events:
                y = model(x)
                half_s = time.monotonic()
                y.sum().backward()
        told += [(event.issued_s, event.op) for event in events]
        forward = [what for when_s, what in sorted(told) if when_s < half_s]
        backward = [what for when_s, what in sorted(told) if when_s > half_s]
        return forward, backward

    gather, compute, made, reduce = "all_gather", "compute", "made", "reduce_scatter"
    for forward, backward in world2.run(run, 0):
        assert forward == [gather, compute] * 3
        assert backward[:-2] == [gather, reduce, gather, made, reduce, gather, made]
        assert sorted(backward[-2:]) == [made, reduce]  # of the first layer, in any order
    for forward, backward in world2.run(run, 1):
        assert forward == [gather, gather, compute, gather, compute, compute]
        assert backward[:-2] == [gather, gather, reduce, gather, made, reduce, made]


def test_compute_in_16_bits_with_masters_in_32(world2: World) -> None:
    def run(dtype: torch.dtype) -> tuple[Any, ...]:
        torch.manual_seed(0)
        module = GPT.preset("tiny")
        predicted = ZeRO3.predict(module, 2, compute_dtype=dtype)
        model = ZeRO3(module, compute_dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen, losses, text = set(), [], Text()
        module.head.register_forward_pre_hook(lambda m, _: seen.add(m.weight.dtype))
        for step in range(STEPS):
            batch = text.batch(step, ROWS, LENGTH).slice(Comm().rank, 2)
            optimizer.zero_grad()
            with listen() as events:
                value = loss(model(batch.x).float(), batch)
                value.backward()
            optimizer.step()
            losses.append(value.item())
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}  # type: ignore[union-attr]
        sent = sum(event.bus_bytes for event in events)
        return losses, held(model, optimizer, sent), predicted, seen

    plain = world2.run(run, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        found = world2.run(run, dtype)
        for (losses, has, should, seen), (expected, *_) in zip(found, plain):
            assert losses == pytest.approx(expected, rel=0.02)
            assert seen == {dtype} and has.bus_bytes == should.bus_bytes
        assert sum(x[1].parameter_bytes for x in found) == 4 * GPT.preset("tiny").parameter_count
        assert should.bus_bytes == plain[0][2].bus_bytes / 2


@on_each_rank("world2")
def test_whole_state_comes_out_and_goes_in() -> None:
    torch.manual_seed(Comm().rank)
    start = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    start[2].weight = nn.Parameter(start[0].weight.detach().t().contiguous())
    model = ZeRO3(copy.deepcopy(start))
    state = model.full_state_dict()
    if Comm().rank == 0:
        assert all(torch.equal(state[name], x) for name, x in start.state_dict().items())
    assert model.full_state_dict(rank0_only=True).keys() == (
        state.keys() if Comm().rank == 0 else set()
    )
    other = {name: torch.randn_like(x) if x.is_floating_point() else x + 1
             for name, x in state.items()}  # fmt: skip
    model.load_full_state_dict(other if Comm().rank == 0 else None)
    if Comm().rank == 0:
        assert all(torch.equal(x, other[n]) for n, x in model.full_state_dict().items())
    else:
        model.full_state_dict()
    model.load_full_state_dict(state)
    assert all(torch.equal(x, state[n]) for n, x in model.full_state_dict().items())


@on_each_rank("world2")
def test_a_state_that_does_not_fit_is_refused_on_every_rank() -> None:
    model = ZeRO3(nn.Linear(3, 2))
    good = model.full_state_dict()
    said = []
    for bad in ({"weight": good["weight"]}, {**good, "more": good["bias"]},
                {**good, "bias": good["weight"]}):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            model.load_full_state_dict(bad if Comm().rank == 0 else None)
        said.append(str(caught.value))
    missing, unknown, shape = said
    assert "bias is missing" in missing and "no more" in unknown
    assert "bias is [2, 3] in the state and [2] in the model" in shape


def test_clipping_is_that_of_the_whole_gradient(world2: World) -> None:
    def run(persist_below: int, norm_type: float) -> tuple[float, float, float]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
        reference, model = copy.deepcopy(module), ZeRO3(module, persist_below=persist_below)
        for one in (model, reference):
            one(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
        found = model.clip_grad_norm_(0.5, norm_type)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
        assert found.dtype == expected.dtype
        return float(found), float(expected), off(model, reference)

    for persist_below in (0, 6):
        for norm_type in (2.0, float("inf")):
            for found, expected, worst in world2.run(run, persist_below, norm_type):
                assert found == pytest.approx(expected, rel=1e-12) and worst < 1e-12


def test_misuse_is_refused_by_name_on_every_rank(world2: World) -> None:
    def said(what: Callable[[], object]) -> str:
        with pytest.raises(ValueError) as caught:
            what()
        return str(caught.value)

    def run() -> list[str]:
        rank = Comm().rank
        blocks = nn.Sequential(Inner(False), Inner(False))
        model = ZeRO3(blocks)
        frozen = ZeRO3(nn.Linear(2, 2))
        frozen.module.weight.requires_grad_(False)
        with torch.device("meta"):
            nowhere = nn.Linear(2, 2)
        return [
            said(lambda: ZeRO3(blocks)),
            said(lambda: ZeRO3(nn.Linear(2 + rank, 2))),
            said(lambda: ZeRO3(nn.ReLU())),
            said(lambda: blocks[0].up(torch.ones(1, 6))),
            said(lambda: frozen(torch.ones(1, 2))),
            said(lambda: ZeRO3(nowhere)),
            said(lambda: ZeRO3(nn.Linear(2, 2), prefetch=-1)),
            said(lambda: model.to(torch.float64)),
        ]

    expected = ("0.up.weight belongs to a ZeRO3 already", "parameter 0 is weight", "no trainable",
                "0.up.weight is sharded", "weight was frozen", "weight is on the meta device",
                "prefetch=-1", "wrap it")  # fmt: skip
    for messages in world2.run(run):
        for message, words in zip(messages, expected, strict=True):
            assert words in message


class NeedsArguments(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)


def test_optimizers_that_do_not_fit_shards_are_refused(world2: World) -> None:
    def step(optimizer: Any, model: ZeRO3, scaler: torch.amp.GradScaler | None = None) -> None:
        value = model(torch.ones(1, 4)).sum()
        if scaler is None:
            value.backward()
            optimizer.step()
        else:
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()

    def run() -> None:
        model = ZeRO3(nn.Linear(4, 4))
        before = model.full_state_dict()
        with pytest.raises(ValueError, match="Adafactor cannot be sharded"):
            step(torch.optim.Adafactor(model.parameters()), model)
        assert all(torch.equal(x, before[n]) for n, x in model.full_state_dict().items())
        step(torch.optim.Adafactor(nn.Linear(2, 2).parameters()), model)  # not on its shards
        step(NeedsArguments(model.parameters(), 0.1), model)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        step(optimizer, model, scaler)
        with pytest.raises(ValueError, match="this rank's shards only.*use labkit.GradScaler"):
            step(optimizer, model, scaler)

    world2.run(run)


@on_each_rank("world2")
def test_errors_leave_a_model_that_trains_on() -> None:
    torch.manual_seed(0)
    module = Deep("not").double()
    reference = copy.deepcopy(module)
    model = ZeRO3(module)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    model(x[Comm().rank]).square().mean().backward()

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(ValueError, match="create_graph=True asks for a graph of backward"):
        model(x[Comm().rank]).square().mean().backward(create_graph=True)
    for where in ("forward", "backward"):
        hook = module.blocks[1].down.register_forward_pre_hook(
            fail if where == "forward" else lambda _, args: args[0].register_hook(fail) and None
        )
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x[Comm().rank]).square().mean().backward()
        hook.remove()
        for change in (1.0, 0.0):
            state = {n: x + change for n, x in reference.state_dict().items()}
            model.load_full_state_dict(state)
            assert all(torch.equal(x, state[n]) for n, x in model.full_state_dict().items())
    model.zero_grad()
    model(x[Comm().rank]).square().mean().backward()
    reference(x.flatten(0, 1)).square().mean().backward()
    assert off(model, reference) < 1e-12


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"all": (self.a(x), [self.b(x)]), "none": None}


def test_outputs_of_any_nesting_recurrent_layers_and_attention(world2: World) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Outputs()])
            self.lstm = nn.LSTM(3, 4)
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.parts[0](x)
            y, _ = self.lstm(found["all"][0] + found["all"][1][0])
            return self.attention(y, y, y)[0]  # type: ignore[no-any-return]

    def run() -> float:
        torch.manual_seed(0)
        module = Mixed().double()
        reference, model = copy.deepcopy(module), None
        model = ZeRO3(module)
        x = torch.randn(2, 5, 4, 3, dtype=torch.float64)  # [rank, s, b, w]
        for _ in range(2):
            model.zero_grad()
            model(x[Comm().rank]).square().mean().backward()
        reference(torch.cat(list(x), dim=1)).square().mean().backward()
        return off(model, reference)

    assert max(world2.run(run)) < 1e-12


class KeepsALossAside(nn.Module):
    """As a router of experts does: what it computed stands on the layer, not in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.aside = (self.layer(torch.tanh(y)) ** 2).mean()
        return y


def _losses_aside(sharded: bool, which: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(KeepsALossAside(), KeepsALossAside())
    x = torch.randn(3, 4)
    model = ZeRO3(module) if sharded else module
    value = model(x).sum()
    first, second = (layer.aside for layer in module)  # type: ignore[union-attr]
    {"all": value + first + second, "aside": first}[which].backward()
    trained = dict(model.named_parameters())
    gradients = {n: p.grad for n, p in trained.items() if p.grad is not None}
    if sharded:
        wholes = Comm().all_gather_object({n: g.tolist() for n, g in gradients.items()})
        names = dict.fromkeys(name for one in wholes for name in one)
        return {n: torch.tensor([x for one in wholes for x in one.get(n, [])]) for n in names}
    return {n: g.reshape(-1) for n, g in gradients.items()}


@pytest.mark.parametrize("which", ["all", "aside"])
def test_a_loss_that_a_layer_keeps_aside_finds_the_weights(world2: World, which: str) -> None:
    expected = _losses_aside(False, which)
    for found in world2.run(_losses_aside, True, which):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, msg=name)


def test_ranks_that_use_different_units_are_reported() -> None:
    def run() -> None:
        model = ZeRO3(Branching())
        model(torch.ones(1, 3, dtype=torch.float64), deep=Comm().rank == 0).sum().backward()

    with World(2, timeout_s=20) as world, pytest.raises(RankError, match="all_gather"):
        world.run(run)


class Adapter(nn.Module):
    """LoRA: a frozen matrix beside two small ones that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class FrozenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8).requires_grad_(False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


class FrozenScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8), requires_grad=False)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x * self.scale))


class OneUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(8, 8), nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class AllTrained(nn.Module):
    """Overwrites its input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mul_(0.5).clone())  # type: ignore[no-any-return]


class AllFrozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.requires_grad_(False)


class Chain(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], again: bool) -> None:
        super().__init__()
        self.again = again
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize(
    "block", [Adapter, FrozenNorm, FrozenScale, OneUnused, AllTrained, AllFrozen]
)
def test_a_unit_is_freed_when_backward_is_through_with_it(
    world2: World, block: Callable[[], nn.Module], again: bool
) -> None:
    """And not before, when the gradients are there but a frozen weight is still needed; nor only at
    the end, where some parameter gets no gradient."""
    if block is AllTrained and again:
        pytest.skip("what is overwritten cannot be computed again")

    def run() -> tuple[float, list[int], int, float, float]:
        torch.manual_seed(0)
        module = Chain(block, again).double()
        reference, predicted = copy.deepcopy(module), ZeRO3.predict(module, 2)
        model = ZeRO3(module)
        unit_bytes = max(sum(f.full.nbytes for f in unit.flats) for unit in model.units)
        x = torch.randn(2, 5, 8, dtype=torch.float64)
        peaks, worst = [], 0.0
        for _ in range(3):
            model.zero_grad()
            reference.zero_grad()
            model.peak_gathered_bytes = 0
            with listen() as events:
                model(x[Comm().rank]).square().mean().backward()
            reference(x.flatten(0, 1)).square().mean().backward()
            peaks.append(model.peak_gathered_bytes)
            worst = max(worst, off(model, reference))
        sent = sum(event.bus_bytes for event in events)
        return worst, peaks, unit_bytes, sent, predicted.bus_bytes

    for worst, peaks, unit_bytes, sent, predicted in world2.run(run):
        assert worst < 1e-12
        assert max(peaks) <= 2 * unit_bytes, [peak / unit_bytes for peak in peaks]
        assert sent == predicted
