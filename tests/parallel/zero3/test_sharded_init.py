"""A model that is built in pieces is the model that one process builds, and no rank has held it."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from harness import Mutation, instead, noticed, on_ranks
from labkit import GPT, MLP, Batch, Comm, RankError, World, ZeRO3, dry_run, listen, loss
from labkit.memory.peak import PeakMemory
from labkit.parallel.zero3 import sharded_init as init
from labkit.parallel.zero3.sharded_init import Elements, ShardedParameter, sharded_init
from labkit.trace.measures import peak_memory
from tables import raises
from worlds import on_each_rank


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        w, b = nn.Parameter(torch.empty(3, 5)), nn.Parameter(torch.empty(3))
        self.w, self.b = w, b
        nn.init.normal_(w)  # the variable, not the attribute, and b was made since
        nn.init.normal_(b)
        self.again = w
        self.table = nn.Embedding(7, 3, padding_idx=2)  # writes to a view: weight[2].fill_(0)
        self.slanted = nn.Parameter(torch.randn(5, 7).t() / 3)  # not contiguous
        self.empty = nn.Parameter(torch.empty(0))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # deepcopy
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.orthogonal = nn.Linear(4, 4)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.orthogonal.bias.data = torch.randn(4)
        self.listed = nn.ParameterList([torch.randn(2), torch.randn(3)])
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)
        self.apply(self.init)
        with torch.no_grad():
            self.w.copy_(self.w @ self.w.t() @ self.w)
            for parameter in self.parameters():
                parameter.mul_(2)
                if parameter.ndim:
                    parameter[:1].add_(1)

    def init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.1)


MAKES: dict[str, Callable[[], nn.Module]] = {
    "tiny": lambda: GPT.preset("tiny"),
    "untied": lambda: GPT.preset("tiny", tied=False),
    "1M": lambda: GPT.preset("1M"),
    "in bf16": lambda: GPT.preset("tiny").to(torch.bfloat16),
    "mlp": lambda: MLP([5, 7, 3]),
    "linear": lambda: nn.Linear(3, 5),
    "padding": lambda: nn.Embedding(7, 3, padding_idx=0),
    "awkward": Awkward,
}


def check_built_as_by_one(name: str, other_seeds: bool = False) -> None:
    """On a rank. Raises AssertionError where a parameter is not what one process builds."""
    torch.manual_seed(0)
    expected = MAKES[name]()
    torch.manual_seed(Comm().rank if other_seeds else 0)
    with sharded_init():
        built = MAKES[name]()
    comm = Comm()
    theirs = dict(expected.named_parameters())
    ours = dict(built.named_parameters())
    assert list(ours) == list(theirs), "the same names, a tied one once"
    for key, p in ours.items():
        q = theirs[key]
        assert isinstance(p, nn.Parameter) and isinstance(p, ShardedParameter)
        for what in ("shape", "dtype", "device", "requires_grad", "is_leaf", "nbytes"):
            assert getattr(p, what) == getattr(q, what), (key, what)
        assert p.stride() == q.stride() and p.numel() == q.numel()
        assert torch.equal(p.whole(), q.detach()), f"{key} has other numbers"
        share = p.elements.share
        assert p.elements.full is None, f"{key} is still whole"
        most = -(-p.numel() // comm.size) * p.element_size()
        assert share.untyped_storage().nbytes() == share.nbytes <= most, f"{key}: too much is held"
    if not other_seeds:
        for (key, mine), one in zip(built.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(mine, one), key


@pytest.mark.parametrize("name", MAKES)
def test_it_is_the_model_that_one_process_builds(world2: World, name: str) -> None:
    world2.run(check_built_as_by_one, name)


@pytest.mark.parametrize("name", ["tiny", "awkward"])
def test_what_rank_0_draws_counts(world2: World, name: str) -> None:
    world2.run(check_built_as_by_one, name, other_seeds=True)


def check_one_at_a_time() -> None:
    """On a rank. Raises AssertionError when more than the shares and one parameter are held."""
    with torch.device("meta"):
        described = [p.nbytes for p in GPT(512, 48, 2, 4, 32).parameters()]
    with PeakMemory() as held, sharded_init():
        model = GPT(512, 48, 2, 4, 32)
    whole, largest, n = sum(described), max(described), Comm().size
    # A little more: collectives have scratch tensors.
    assert held.peak_bytes <= largest + whole / n + largest / n + 4096, held.peak_bytes / whole
    held_now = sum(p.elements.share.nbytes for p in model.parameters())
    assert held_now <= whole / n + 4 * len(described)


def test_no_more_than_one_parameter_is_whole(world2: World) -> None:
    world2.run(check_one_at_a_time)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 4])
def test_on_other_numbers_of_ranks(worlds: Any, size: int) -> None:
    worlds(size).run(check_one_at_a_time)
    for name in MAKES:
        worlds(size).run(check_built_as_by_one, name)


@on_each_rank("world2")
def test_what_travels() -> None:
    """A parameter goes out to its shares when it closes; it comes back when it is read."""
    weight, bias, two = ("scatter", 48), ("scatter", 8), ("scatter", 4)
    with listen() as drawn, sharded_init():
        nn.Linear(6, 4)
    sent = [(e.op, e.bus_bytes) for e in drawn]
    assert sent == [weight, bias, weight, bias], "made; drawn, without a gather"
    with listen() as read, sharded_init():
        layer = nn.Linear(6, 4, bias=False)
        other = nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            layer.weight.mul_(2)
    del layer, other
    assert [(e.op, e.bus_bytes) for e in read] == [weight, two, ("all_gather", 48), weight]


@on_each_rank("world2")
def test_a_sharded_parameter_that_computes_says_what_to_do() -> None:
    with sharded_init():
        model = nn.Sequential(nn.Linear(3, 5))
    for use, words in (
        (lambda: model(torch.ones(1, 3)), "Linear.weight [5, 3]"),
        (lambda: model[0].bias + 1, "add on Linear.bias [5]"),
        (lambda: model.state_dict()["0.bias"].sum(), ""),
        (lambda: nn.init.zeros_(model[0].bias), ""),
    ):
        raises(("sharded", "ZeRO3", "parameter.whole()", words), use)
    assert Comm().rank == 0 or "rank 1 has 2 of 5 elements" in repr(model[0].bias)


@on_each_rank("world2")
def test_it_is_copied_and_converted_share_by_share() -> None:
    with sharded_init():
        model = Awkward()
    with listen() as events:
        copied, narrow = copy.deepcopy(model), copy.deepcopy(model).to(torch.float64)
    assert not events
    assert copied.head.weight is copied.table.weight is not model.table.weight
    for p, q, r in zip(model.parameters(), copied.parameters(), narrow.parameters()):
        assert torch.equal(p.whole(), q.whole()) and p.requires_grad == q.requires_grad
        expected = p.whole().double() if p.is_floating_point() else p.whole()
        assert r.dtype == expected.dtype and torch.equal(r.whole(), expected)
        assert r.requires_grad == p.requires_grad and isinstance(r, nn.Parameter)


@on_each_rank("world2")
def test_outside_and_after_an_error_modules_are_as_always() -> None:
    register = nn.Module.register_parameter
    before = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), sharded_init():
        nn.Linear(2, 2)
        1 / 0  # noqa: B018
    with sharded_init():
        lazy = nn.LazyLinear(3)
        with torch.device("meta"):
            on_meta = nn.Linear(2, 2)
    assert nn.Module.register_parameter is register
    modules = (before, nn.Linear(2, 2), on_meta)
    assert type(lazy.weight) is nn.UninitializedParameter
    assert [type(module.weight) for module in modules] == [nn.Parameter] * 3


@on_each_rank("world2")
def test_some_of_the_ranks_build_a_model() -> None:
    comm = Comm().subgroup([1])
    if comm is not None:
        with sharded_init(comm):
            assert nn.Linear(3, 5).weight.elements.share.numel() == 15


def test_it_is_recorded_without_data() -> None:
    """What no laptop holds; on paper, too, a rank holds no more than one parameter and shares."""

    def build() -> None:
        with sharded_init():
            model = nn.Sequential(*[nn.Linear(50_000, 50_000) for _ in range(4)])
            model[3].weight = model[0].weight
        model.to(torch.bfloat16)
        assert model[3].weight is model[0].weight and len(list(model.parameters())) == 7
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {p.whole().dtype for p in model.parameters()} == {torch.bfloat16}
        plain = nn.Linear(2, 2)
        plain(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(plain.parameters()).step()

    one = dry_run(build, ranks=64, step=0).ranks[0]
    assert {event.op for event in one.comms} == {"scatter", "all_gather"}
    assert 10e9 < sum(peak_memory(one).values()) < (1 + 4 / 64 + 0.02) * 10e9


@on_each_rank("world2")
def test_zero_3_trains_what_was_built_in_shares() -> None:
    losses: dict[bool, list[float]] = {True: [], False: []}
    for in_shares, found in losses.items():
        torch.manual_seed(0)
        with ZeRO3.init() if in_shares else nullcontext():
            module = GPT.preset("tiny")
        model, x = ZeRO3(module), torch.arange(16).view(1, 16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            value = loss(model(x), Batch(x, x, 16))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            found.append(value.item())
    assert losses[True] == losses[False]


def never_closes(self: Any, wanted: list[Elements], overwritten: Any = None) -> None:
    for one in wanted:
        assert one.full is not None


def whole_once_more(self: Elements) -> torch.Tensor:
    full, self.full = self.full, None
    return full.reshape(-1)


def part_of(self: Elements, flat: torch.Tensor) -> torch.Tensor:
    comm = self.construction.comm
    return flat.tensor_split(comm.size)[comm.rank]


def closes_with_the_share_of_another(self: Elements) -> None:
    self.construction.comm.broadcast(flat := whole_once_more(self).clone())
    self.share = flat[: part_of(self, flat).numel()].clone()  # the first, on every rank


def keeps_its_own(self: Elements) -> None:
    self.share = part_of(self, whole_once_more(self)).clone()


def shares_memory_with_the_whole(self: Elements) -> None:
    self.construction.comm.broadcast(flat := whole_once_more(self))
    self.share = part_of(self, flat)


def never_gathers(self: Elements) -> torch.Tensor:
    return self.empty_whole().zero_()


def forgets_views() -> Any:
    dispatch = ShardedParameter.__torch_dispatch__

    def faulty(cls: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = dispatch(op, types, args, kwargs)
        return found.clone() if op.overloadpacket.__name__ in ("select", "slice") else found

    return patch.object(ShardedParameter, "__torch_dispatch__", classmethod(faulty))


BUILT = (check_built_as_by_one, "awkward", True)
FAULTS = [
    Mutation(
        instead("never_closes", init.Construction, "open_only", never_closes), check_one_at_a_time),
    *(Mutation(instead(fault.__name__, Elements, name, fault), *BUILT)
      for name, fault in (
          ("close", closes_with_the_share_of_another),
          ("close", keeps_its_own),
          ("close", shares_memory_with_the_whole),
          ("gathered", never_gathers),
      )),
    Mutation(forgets_views, *BUILT),
]  # fmt: skip
test_a_fault_turns_it_red = pytest.mark.slow(
    noticed(FAULTS, on_ranks, RankError, match="AssertionError", size=2)
)
