"""ZeRO-3 under habits of torch users: as on a plain module, or refused before it does harm."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import labkit
from labkit import Comm, RankError, World, ZeRO3, full_state_dict
from small_models import Custom, difference
from tables import raises
from test_zero3 import off, twins
from worlds import on_each_rank, world_fixture

world = world_fixture(sizes=[1, 2, 3], timeout_s=60)

pair = world_fixture(2, timeout_s=60)
unchecked = world_fixture(2, timeout_s=60, check=False)


def train(build: Callable[[], nn.Module], inputs: list[Any], sharded: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    module = build().double()
    model: Any = ZeRO3(module, **options) if sharded else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, n = Comm().rank, Comm().size
    for _ in range(2):
        optimizer.zero_grad()
        if sharded:
            model(*inputs[rank]).square().mean().backward()
        else:
            (sum(model(*one).square().mean() for one in inputs[:n]) / n).backward()
        optimizer.step()
    return model.full_state_dict() if sharded else module.state_dict()


def assert_same(build: Callable[[], nn.Module], inputs: list[Any], **options: Any) -> None:
    assert difference(train(build, inputs, True, **options), train(build, inputs, False)) < 1e-12


def rows(*shape: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(*shape, dtype=torch.float64, generator=generator),) for _ in range(3)]


def route(routes: list[list[int]], how: str, persist_below: int = 0) -> None:
    def forward(model: Any, x: torch.Tensor, *which: int) -> torch.Tensor:
        for number in which:
            x = model.experts[number](x)
        return x

    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model = ZeRO3(Custom(forward, experts=experts), persist_below=persist_below)
    model.train(how != "evaluation")
    with torch.set_grad_enabled(how != "no_grad"):
        y = model(torch.ones(1, 4), *routes[Comm().rank])
    if how == "training":
        y.sum().backward()


@pytest.mark.parametrize(
    ("how", "persist_below"),
    [("training", 0), ("evaluation", 0), ("no_grad", 0), ("training", 100)],
    ids=["training", "evaluation", "no_grad", "kept whole"],
)
@pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])
def test_ranks_that_route_to_different_experts_are_reported(
    pair: World, unchecked: World, how: str, persist_below: int, checks: bool
) -> None:
    with pytest.raises(RankError, match=r"(?s)experts\.0\.weight.*experts\.1\.weight"):
        (pair if checks else unchecked).run(route, [[0], [1]], how, persist_below)


@on_each_rank("unchecked")
def test_without_checks_every_rank_raises_in_the_step_itself() -> None:
    words = "(unit of experts.0.weight) | all_gather(unit of experts.1.weight)"
    raises((words,), route, [[0, 2], [1, 2]], "training", error=labkit.CollectiveMismatch)
    route([[0], [0]], "training")  # the group is of use afterwards


def test_a_rank_that_uses_fewer_units_is_reported(pair: World) -> None:
    with pytest.raises(RankError, match=r"all_gather\(unit of experts\.2\.weight"):
        pair.run(route, [[0, 2], [0]], "training")


@on_each_rank("unchecked")
def test_the_same_route_on_all_ranks_may_change_from_step_to_step() -> None:
    for number in (0, 1, 1, 2, 0):
        route([[number], [number]], "training")


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as it is", "compute_dtype"])
@on_each_rank("world")
def test_a_tensor_given_twice_is_one_tensor_inside_a_unit(dtype: torch.dtype | None) -> None:
    def alike(block: Any, q: Any, k: Any, box: list[Any], deep: dict[str, Any]) -> torch.Tensor:
        pair, inner = deep["pair"]
        factor = 1 if q is k and q is box[0] and q is pair and q is inner[0] else 100
        return q * block.weight * factor

    def forward(model: Any, x: torch.Tensor) -> Any:
        x = model.embed(x)
        x = model.attend(x, x, value=x)[0]
        return model.blocks[0](x, x, box=[x], deep={"pair": (x, [x])})

    def build() -> nn.Module:
        blocks = nn.ModuleList([Custom(alike, weight=nn.Parameter(torch.ones(4)))])
        attend = nn.MultiheadAttention(4, 2, batch_first=True)
        return Custom(forward, embed=nn.Linear(4, 4), attend=attend, blocks=blocks)

    assert_same(build, rows(2, 3, 4), compute_dtype=dtype)


@on_each_rank("pair")
def test_inputs_that_are_converted_stay_one_tensor() -> None:
    def forward(layer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        assert x is y and x.dtype == torch.bfloat16
        return x @ layer.weight

    layer = Custom(forward, weight=nn.Parameter(torch.ones(4, 4)))
    model = ZeRO3(layer, compute_dtype=torch.bfloat16)
    assert model(x := torch.ones(1, 4), x).dtype == torch.bfloat16


@on_each_rank("world")
def test_what_a_unit_writes_to_a_list_reaches_its_caller() -> None:
    def writes_aside(block: Any, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        x = block.layer(x)
        losses.append(x.square().mean())
        return x

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for block in model.blocks:
            x = block(x, losses)
        return x + sum(losses)

    def build() -> nn.Module:
        layers = [Custom(writes_aside, layer=nn.Linear(4, 4)) for _ in range(3)]
        return Custom(forward, blocks=nn.ModuleList(layers))

    assert_same(build, rows(2, 4))


class TiedHead(nn.Module):
    """`how`: in which way the embedding's weight is used by the head."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4).requires_grad_(how != "frozen")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        early = self.embedding.weight.t() if self.how == "a view taken early" else None
        assert self.embedding.weight.shape == (7, 4)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.how != "twice" else block(block(x))
        if early is not None:
            return x @ early
        if self.how == "recomputed":
            return checkpoint(self._head, x, use_reentrant=False)
        return self._head(x)

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.norm.weight + self.norm.bias
        return F.linear(torch.tanh(x), self.embedding.weight)


@pytest.mark.parametrize("how", ["plain", "frozen", "twice", "recomputed", "a view taken early"])
@on_each_rank("world")
def test_a_head_may_use_the_weight_of_the_embedding(how: str) -> None:
    tokens = [(torch.tensor([[rank, 3, 5]]),) for rank in range(3)]
    for prefetch in (0, 1, 3):
        assert_same(lambda: TiedHead(how), tokens, prefetch=prefetch)
    model = ZeRO3(TiedHead(how))
    with torch.no_grad():
        model(*tokens[0])
    assert all(p.ndim == 1 for p in model.module.parameters()) and model.gathered_bytes == 0


@on_each_rank("world")
def test_a_unit_may_put_out_a_view_of_its_parameter() -> None:
    """Its memory was freed: the ranks died of SIGSEGV."""

    def build() -> nn.Module:
        positions = Custom(lambda m, n: m.table[:n], table=nn.Parameter(torch.randn(300, 400)))
        head = nn.Linear(400, 2)
        return Custom(lambda m, x: m.head(x + m.positions(len(x))), positions=positions, head=head)

    assert_same(build, rows(200, 400))


@on_each_rank("world")
def test_an_optimizer_from_before_the_wrap_is_refused_at_its_first_step() -> None:
    x, module, other = torch.ones(1, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    early = torch.optim.AdamW([*module.parameters(), *other.parameters()], lr=0.1)
    module(x).sum().backward()
    early.step()  # it is right until the wrap
    model = ZeRO3(module)
    before = model.full_state_dict()
    early.zero_grad()
    model(x).sum().backward()
    raises(("from before ZeRO3(module)",), early.step)
    assert difference(model.full_state_dict(), before) == 0
    torch.optim.AdamW([*model.parameters(), *other.parameters()], lr=0.1).step()
    assert difference(model.full_state_dict(), before) > 0


class Renormed(nn.Linear):
    """Has rows of length 1: written in place before they are used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


@on_each_rank("world")
def test_a_forward_that_writes_to_a_parameter_is_refused() -> None:
    frozen = Renormed(3, 3).requires_grad_(False)
    tokens, x = torch.tensor([0, 1]), torch.ones(2, 3)
    for module, given, below, name in (
        (nn.Sequential(nn.Embedding(2, 3, max_norm=0.1), nn.Linear(3, 1)), tokens, 0, "0.weight"),
        (nn.Sequential(nn.Linear(3, 3), Renormed(3, 1)), x, 0, "1.weight"),
        (nn.Sequential(nn.Linear(3, 3), frozen), x, 0, "1.weight"),
        (Renormed(3, 1), x, 10, "weight"),
    ):
        raises((f"wrote to {name},",), ZeRO3(module, persist_below=below), given)


@on_each_rank("world")
def test_a_step_after_backward_with_inputs_is_refused() -> None:
    model = ZeRO3(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # nothing was asked for
    with torch.no_grad():
        model(torch.ones(1, 4))
    optimizer.step()
    model(torch.ones(1, 4)).sum().backward(inputs=list(model.parameters()))
    raises("without inputs=", optimizer.step)

    def closure() -> float:
        optimizer.zero_grad()
        value = model(torch.ones(1, 4)).sum()
        value.backward()
        return float(value)

    losses = [optimizer.step(closure) for _ in range(2)]
    assert losses[1] < losses[0]


@on_each_rank("world")
def test_a_hook_on_a_parameter_is_called_with_its_gradient() -> None:
    module = nn.Linear(4, 3)
    seen: list[Any] = []
    handle = module.weight.register_hook(lambda g: seen.append(list(g.shape)) or g * 2)
    model = ZeRO3(module)
    for weight_norm in (12 * 4, 12):  # doubled, and after the hook is removed
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        assert float(model.clip_grad_norm_(1e9)) == pytest.approx((weight_norm + 3) ** 0.5)
        handle.remove()
    assert seen == [[3, 4]]


@on_each_rank("world")
def test_hooks_that_would_never_be_called_are_refused() -> None:
    module, model = nn.Linear(4, 4), ZeRO3(nn.Linear(4, 4))
    module.weight.register_post_accumulate_grad_hook(lambda p: None)
    shard = next(model.parameters())
    for call in (
        lambda: ZeRO3(module),
        lambda: shard.register_hook(lambda g: g),
        lambda: shard.register_post_accumulate_grad_hook(lambda p: None),
    ):
        raises("would never be called", call)
    plain = nn.Linear(4, 4)
    labkit.DDP(plain)(torch.ones(1, 4)).sum().backward()
    ZeRO3(plain)  # what a strategy that is gone has left does not count


def gradients(**options: Any) -> tuple[ZeRO3, nn.Module]:
    torch.manual_seed(0)
    pair = twins(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), **options)
    for model in pair:
        model(torch.ones(2, 4)).sum().backward()
    return pair


@pytest.mark.parametrize("foreach", [None, True, False])
@on_each_rank("pair")
def test_torchs_clipping_by_norm_is_refused_before_any_change(foreach: bool | None) -> None:
    model, _ = gradients()
    parameters, norm_of = list(model.parameters()), nn.utils.get_total_norm
    before = [p.grad.clone() for p in parameters]
    clip = nn.utils.clip_grad_norm_
    for call in (
        lambda: clip(model.parameters(), 0.1, foreach=foreach),
        lambda: clip(parameters, 0.1, float("inf"), True, foreach),
        lambda: norm_of([p.grad for p in parameters], foreach=foreach),
        lambda: parameters[0].grad.norm(),
    ):
        raises(("labkit.clip_grad_norm(model, max_norm)",), call)
    assert all(torch.equal(p.grad, x) for p, x in zip(parameters, before))


@pytest.mark.parametrize("foreach", [None, True, False])
@on_each_rank("world")
def test_torchs_clipping_that_is_right_is_that_of_the_whole_model(foreach: bool | None) -> None:
    model, reference = gradients()
    for clipped in (model, reference):
        nn.utils.clip_grad_value_(clipped.parameters(), 1.5, foreach=foreach)
    assert off(model, reference) < 1e-6
    if Comm().size == 1:  # of one rank, torch's norm is right
        pair = (model, reference)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=foreach) for m in pair]
        torch.testing.assert_close(*norms)


def test_a_shards_gradient_is_a_plain_tensor_for_all_else(pair: World) -> None:
    def run() -> list[Any]:
        model, _ = gradients()
        grads: list[Any] = [p.grad for p in model.parameters()]
        for made in (copy.deepcopy(grads[0]), grads[0] * 2, grads[0].clone(), grads[0].detach()):
            assert type(made) is torch.Tensor and made.norm() >= 0
        torch.save(grads, kept := io.BytesIO())
        kept.seek(0)
        assert all(type(x) is torch.Tensor for x in torch.load(kept))
        model, _ = gradients(persist_below=1000)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # whole on every rank: torch's is right
        return grads

    for grads in pair.run(run):  # also when it travels
        assert all(type(x) is torch.Tensor for x in grads)


@on_each_rank("world")
def test_copies_and_pickles_are_refused_and_end_no_rank() -> None:
    """`copy.deepcopy` read parameters that were freed: SIGSEGV."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.BatchNorm1d(4))

    model = ZeRO3(build())
    layer = model.module[0][0]  # inside of a unit
    for call in (
        lambda: copy.deepcopy(model),
        lambda: copy.copy(model),
        lambda: copy.deepcopy(model.module),
        lambda: copy.deepcopy([model.module[0]]),
        lambda: copy.deepcopy(layer),
        lambda: pickle.dumps(layer),
        lambda: torch.optim.swa_utils.AveragedModel(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.save(model.module, io.BytesIO()),
    ):
        raises(("cannot be copied or pickled; save its full_state_dict()",), call)
    second = ZeRO3(build())
    second.load_full_state_dict(model.full_state_dict())  # what the sentence says
    x = torch.randn(3, 4)
    assert torch.equal(model.eval()(x), second.eval()(x))


@pytest.mark.slow
@on_each_rank("world")
def test_torch_compile_of_a_wrapped_model_leaves_it_as_it_is() -> None:
    for how in ("function", "method"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model, reference = twins(module.double())
        compiled: Any = torch.compile(model) if how == "function" else model
        if how == "method":
            model.compile()
        x = torch.randn(2, 4, dtype=torch.float64)
        with warnings.catch_warnings(record=True, action="always") as seen:
            (y := compiled(x)).sum().backward()
        assert not seen
        (expected := reference(x)).sum().backward()
        assert float((y - expected).abs().max()) < 1e-12
        assert off(model, reference) < 1e-12


@on_each_rank("world")
def test_a_compiled_module_is_refused() -> None:
    method = nn.Sequential(nn.Linear(4, 4))
    method[0].compile()
    some = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4)))
    for module in (torch.compile(nn.Linear(4, 4)), method, some):
        raises("wrap the plain module", ZeRO3, module)


@on_each_rank("world")
def test_the_whole_state_is_whole_around_a_compiled_model_too() -> None:
    """`torch.compile` hides that the model is ZeRO3; a state dict of shards looks like a state."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    right = {name: x.clone() for name, x in module.state_dict().items()}
    model = ZeRO3(module)
    for one in (model, torch.compile(model, backend="eager")):
        assert difference(full_state_dict(one), right) == 0
    raises("contains a ZeRO3", full_state_dict, nn.Sequential(model))
