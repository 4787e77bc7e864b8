"""ZeRO-3 under habits of torch users: each works as on a plain module, or is refused before it does
harm."""

import copy
import gc
import io
import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import labkit
from labkit import Comm, RankError, World, ZeRO3, full_state_dict
from worlds import on_each_rank, world_fixture

Forward = Callable[..., torch.Tensor]


world = world_fixture(sizes=[1, 2, 3], timeout_s=60)


pair = world_fixture(2, timeout_s=60)


unchecked = world_fixture(2, timeout_s=60, check=False)


def refusal(what: Callable[[], object]) -> str:
    """The sentence with which `what` is refused."""
    with pytest.raises(ValueError) as caught:
        what()
    return str(caught.value)


def train(build: Callable[[], nn.Module], inputs: list[Any], sharded: bool, **options: Any) -> Any:
    """Two steps of SGD on the mean of all ranks' losses; weights after them."""
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


def off(build: Callable[[], nn.Module], inputs: list[Any], **options: Any) -> float:
    """How far weights trained under ZeRO3 are from those of one process."""
    expected, found = train(build, inputs, False), train(build, inputs, True, **options)
    return max(float((found[name] - x).abs().max()) for name, x in expected.items())


def rows(*shape: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(*shape, dtype=torch.float64, generator=generator),) for _ in range(3)]


# --- ranks that use different units ---


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, *which: int) -> torch.Tensor:
        for number in which:
            x = self.experts[number](x)
        return x


def route(routes: list[list[int]], how: str, persist_below: int = 0) -> None:
    model = ZeRO3(Experts(), persist_below=persist_below)
    chosen = routes[Comm().rank]
    if how == "training":
        model(torch.ones(1, 4), *chosen).sum().backward()
    elif how == "evaluation":
        model.eval()(torch.ones(1, 4), *chosen)
    else:
        with torch.no_grad():
            model(torch.ones(1, 4), *chosen)


@pytest.mark.parametrize("how", ["training", "evaluation", "no_grad"])
@pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])
def test_ranks_that_route_to_different_experts_are_reported(
    pair: World, unchecked: World, how: str, checks: bool
) -> None:
    with pytest.raises(RankError, match=r"(?s)experts\.0\.weight.*experts\.1\.weight"):
        (pair if checks else unchecked).run(route, [[0], [1]], how)


@on_each_rank("unchecked")
def test_without_checks_every_rank_raises_in_the_step_itself() -> None:
    with pytest.raises(labkit.CollectiveMismatch) as caught:
        route([[0, 2], [1, 2]], "training")
    route([[0], [0]], "training")  # the group is of use afterwards
    message = str(caught.value)
    assert "(unit of experts.0.weight) | all_gather(unit of experts.1.weight)" in message


@pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])
def test_small_experts_that_are_kept_whole_are_compared_too(
    pair: World, unchecked: World, checks: bool
) -> None:
    with pytest.raises(RankError, match=r"(?s)experts\.0\.weight.*experts\.1\.weight"):
        (pair if checks else unchecked).run(route, [[0], [1]], "training", persist_below=100)


def test_a_rank_that_uses_fewer_units_is_reported(pair: World) -> None:
    with pytest.raises(RankError, match=r"all_gather\(unit of experts\.2\.weight"):
        pair.run(route, [[0, 2], [0]], "training")


@on_each_rank("unchecked")
def test_the_same_route_on_all_ranks_may_change_from_step_to_step() -> None:
    for number in (0, 1, 1, 2, 0):
        route([[number], [number]], "training")


@on_each_rank("pair")
def test_comparing_costs_no_bytes_where_ranks_compare_anyway() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    predicted = ZeRO3.predict(module, Comm().size).bus_bytes
    model = ZeRO3(module)
    with labkit.listen() as events:
        model(torch.ones(1, 4)).sum().backward()
    sent = sum(event.bus_bytes for event in events)
    predicted = int(predicted)
    assert sent == predicted


# --- inputs ---


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.blocks = nn.ModuleList([Alike()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = self.attend(x, x, value=x)[0]
        return self.blocks[0](x, x, box=[x], deep={"pair": (x, [x])})  # type: ignore[no-any-return]


class Alike(nn.Module):
    """Computes something else where one tensor has become two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, box: list[torch.Tensor], deep: dict[str, Any]
    ) -> torch.Tensor:
        pair, inner = deep["pair"]
        factor = 1 if q is k and q is box[0] and q is pair and q is inner[0] else 100
        return q * self.weight * factor


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as it is", "compute_dtype"])
@on_each_rank("world")
def test_a_tensor_given_twice_is_one_tensor_inside_a_unit(dtype: torch.dtype | None) -> None:
    assert off(Attention, rows(2, 3, 4), compute_dtype=dtype) < 1e-12


@on_each_rank("pair")
def test_inputs_that_are_converted_stay_one_tensor() -> None:
    seen = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.append(x is y and x.dtype == torch.bfloat16)
            return super().forward(x)

    x = torch.ones(1, 4)
    ZeRO3(Looks(4, 4), compute_dtype=torch.bfloat16)(x, x)
    assert seen == [True]


class WritesAside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        x = self.layer(x)
        losses.append(x.square().mean())
        return x


class SumsLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritesAside() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return x + sum(losses)


def test_what_a_unit_writes_to_a_list_reaches_its_caller(world: World) -> None:
    assert max(world.run(lambda: off(SumsLosses, rows(2, 4)))) < 1e-12


# --- parameters used outside of their unit ---


class TiedHead(nn.Module):
    """`how`: in which way the embedding's weight is used by the head."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        if how == "frozen":
            self.norm.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        early = self.embedding.weight.t() if self.how == "a view taken early" else None
        assert self.embedding.weight.shape == (7, 4)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.how != "twice" else block(block(x))
        if early is not None:
            return x @ early
        if self.how == "recomputed":
            return checkpoint(self._head, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._head(x)

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.norm.weight + self.norm.bias
        return F.linear(torch.tanh(x), self.embedding.weight)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("how", ["plain", "frozen", "twice", "recomputed", "a view taken early"])
@on_each_rank("world")
def test_a_head_may_use_the_weight_of_the_embedding(how: str, prefetch: int) -> None:
    tokens = [(torch.tensor([[rank, 3, 5]]),) for rank in range(3)]
    worst = off(lambda: TiedHead(how), tokens, prefetch=prefetch)
    model = ZeRO3(TiedHead(how))
    with torch.no_grad():
        model(*tokens[0])
    shards = all(p.ndim == 1 for p in model.module.parameters())
    is_freed = shards and model.gathered_bytes == 0
    assert worst < 1e-12 and is_freed


class GivesAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(300, 400))

    def forward(self, n: int) -> torch.Tensor:
        return self.table[:n]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.head = GivesAView(), nn.Linear(400, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.positions(len(x)))  # type: ignore[no-any-return]


def test_a_unit_may_put_out_a_view_of_its_parameter(world: World) -> None:
    """Its memory was freed: the ranks died of SIGSEGV."""
    assert max(world.run(lambda: off(Positions, rows(200, 400)))) < 1e-12


# --- optimizers and backward ---


@on_each_rank("world")
def test_an_optimizer_from_before_the_wrap_is_refused_at_its_first_step() -> None:
    x, module, other = torch.ones(1, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    early = torch.optim.AdamW([*module.parameters(), *other.parameters()], lr=0.1)
    module(x).sum().backward()
    early.step()  # it is right until the wrap
    model = ZeRO3(module)
    before = model.full_state_dict()["weight"]
    early.zero_grad()
    model(x).sum().backward()
    said = refusal(early.step)
    unchanged = torch.equal(before, model.full_state_dict()["weight"])
    torch.optim.AdamW([*model.parameters(), *other.parameters()], lr=0.1).step()
    never = torch.equal(before, model.full_state_dict()["weight"])
    assert "from before ZeRO3(module)" in said and unchanged and not never


@on_each_rank("pair")
def test_a_dropped_model_is_freed() -> None:
    module = TiedHead()
    model, tokens = ZeRO3(module), torch.tensor([[1, 2]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens).sum().backward()
    optimizer.step()
    gone = [ref(model), ref(model.units[0].flats[0].share)]
    del model, module, optimizer
    gc.collect()
    assert [one() is None for one in gone] == [True, True]


class Renormed(nn.Linear):
    """Has rows of length 1: written in place before they are used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


@on_each_rank("world")
def test_a_forward_that_writes_to_a_parameter_is_refused() -> None:
    frozen = Renormed(3, 3).requires_grad_(False)
    words, x = torch.tensor([0, 1]), torch.ones(2, 3)
    every = [
        (nn.Sequential(nn.Embedding(2, 3, max_norm=0.1), nn.Linear(3, 1)), words, 0),
        (nn.Sequential(nn.Linear(3, 3), Renormed(3, 1)), x, 0),
        (nn.Sequential(nn.Linear(3, 3), frozen), x, 0),
        (Renormed(3, 1), x, 10),
    ]
    said = [
        refusal(lambda: ZeRO3(module, persist_below=below)(given))  # noqa: B023
        for module, given, below in every
    ]
    names = [sentence.split("wrote to ")[1].split(",")[0] for sentence in said]
    assert names == ["0.weight", "1.weight", "1.weight", "weight"]


@on_each_rank("world")
def test_a_step_after_backward_with_inputs_is_refused() -> None:
    model = ZeRO3(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # nothing was asked for
    with torch.no_grad():
        model(torch.ones(1, 4))
    optimizer.step()
    model(torch.ones(1, 4)).sum().backward(inputs=list(model.parameters()))
    said = refusal(optimizer.step)

    def closure() -> float:
        optimizer.zero_grad()
        value = model(torch.ones(1, 4)).sum()
        value.backward()
        return float(value)

    losses = [optimizer.step(closure) for _ in range(2)]
    assert "without inputs=" in said and losses[1] < losses[0]


@on_each_rank("world")
def test_a_hook_on_a_parameter_is_called_with_its_gradient() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    seen: list[Any] = []
    handle = module.weight.register_hook(lambda g: seen.append(list(g.shape)) or g * 2)
    model = ZeRO3(module)
    norms = []
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        norms.append(float(model.clip_grad_norm_(1e9)))
        handle.remove()
    seen, doubled, plain = seen, *norms
    assert seen == [[3, 4]]
    assert doubled == pytest.approx((12 * 4 + 3) ** 0.5)
    assert plain == pytest.approx((12 + 3) ** 0.5)


@on_each_rank("world")
def test_hooks_that_would_never_be_called_are_refused() -> None:
    module, model = nn.Linear(4, 4), ZeRO3(nn.Linear(4, 4))
    module.weight.register_post_accumulate_grad_hook(lambda p: None)
    shard = next(model.parameters())
    said = [refusal(lambda: ZeRO3(module))]
    said += [refusal(lambda: shard.register_hook(lambda g: g))]
    said += [refusal(lambda: shard.register_post_accumulate_grad_hook(lambda p: None))]
    plain = nn.Linear(4, 4)
    labkit.DDP(plain)(torch.ones(1, 4)).sum().backward()
    ZeRO3(plain)  # what a strategy that is gone has left does not count
    assert all("would never be called" in one for one in said)


# --- the norm of gradients ---


def gradients(**options: Any) -> tuple[ZeRO3, nn.Module]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    reference, model = copy.deepcopy(module), ZeRO3(module, **options)
    for one in (reference, model):
        one(torch.ones(2, 4)).sum().backward()
    return model, reference


@pytest.mark.parametrize("foreach", [None, True, False])
@on_each_rank("pair")
def test_torchs_clipping_by_norm_is_refused_before_it_changes_anything(
    foreach: bool | None,
) -> None:
    model, _ = gradients()
    parameters, norm_of = list(model.parameters()), nn.utils.get_total_norm
    before = [p.grad.clone() for p in parameters]  # type: ignore[union-attr]
    clip = nn.utils.clip_grad_norm_
    said = [
        refusal(lambda: clip(model.parameters(), 0.1, foreach=foreach)),
        refusal(lambda: clip(parameters, 0.1, float("inf"), True, foreach)),
        refusal(lambda: norm_of([p.grad for p in parameters], foreach=foreach)),  # type: ignore[misc]
        refusal(lambda: parameters[0].grad.norm()),  # type: ignore[union-attr]
    ]
    assert all(torch.equal(p.grad, x) for p, x in zip(parameters, before))  # type: ignore[arg-type]
    assert all("labkit.clip_grad_norm(model, max_norm)" in one for one in said)


@on_each_rank("world")
def test_one_rank_clips_as_torch_does() -> None:
    model, reference = gradients()
    ours = labkit.clip_grad_norm(model, 0.1)
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    if Comm().size == 1:
        model, _ = gradients()
        ours = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    ours = float(ours)
    theirs = float(theirs)
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("foreach", [None, True, False])
@on_each_rank("world")
def test_clipping_by_value_is_that_of_the_whole_model(foreach: bool | None) -> None:
    model, reference = gradients()
    for one in (model, reference):
        nn.utils.clip_grad_value_(one.parameters(), 1.5, foreach=foreach)
    whole = dict(reference.named_parameters())
    assert (
        max(
            float((p.tensor.grad - _part(whole[p.name].grad, p)).abs().max()) for p in model.owned()
        )
        < 1e-6
    )


def _part(x: Any, piece: Any) -> torch.Tensor:
    part: torch.Tensor = x.reshape(-1)[piece.start : piece.start + piece.tensor.numel()]
    return part.view(piece.tensor.shape)


def test_a_shards_gradient_is_a_plain_tensor_for_all_else(pair: World) -> None:
    def run() -> list[torch.Tensor]:
        model, _ = gradients()
        grads = [p.grad for p in model.parameters()]
        for made in (copy.deepcopy(grads[0]), grads[0] * 2, grads[0].clone(), grads[0].detach()):
            assert type(made) is torch.Tensor and made.norm() >= 0
        kept = io.BytesIO()
        torch.save(grads, kept)
        kept.seek(0)
        assert all(type(x) is torch.Tensor for x in torch.load(kept))
        model, _ = gradients(persist_below=1000)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # whole on every rank: torch's is right
        return grads  # type: ignore[return-value]

    for grads in pair.run(run):  # also when it travels
        assert all(type(x) is torch.Tensor for x in grads)


@on_each_rank("world")
def test_a_loss_scaler_and_labkits_clipping_work_together() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    reference, model = copy.deepcopy(module), ZeRO3(module)
    scaler = labkit.GradScaler(init_scale=1024.0, comm=model.comm)
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for _ in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
        scaler.unscale_(ours)
        labkit.clip_grad_norm(model, 0.5)
        scaler.step(ours)
        scaler.update()
        reference(torch.ones(2, 4)).square().sum().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        theirs.step()
    found = model.full_state_dict()
    assert max(float((found[n] - x).abs().max()) for n, x in reference.state_dict().items()) < 1e-5


# --- copies and compilers ---


@on_each_rank("world")
def test_copies_and_pickles_are_refused_and_end_no_rank() -> None:
    """`copy.deepcopy` read parameters that were freed: SIGSEGV."""
    model = ZeRO3(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    said = [
        refusal(lambda: copy.deepcopy(model)),
        refusal(lambda: copy.copy(model)),
        refusal(lambda: copy.deepcopy(model.module)),
        refusal(lambda: copy.deepcopy([model.module[0]])),  # type: ignore[index]
        refusal(lambda: torch.optim.swa_utils.AveragedModel(model)),
        refusal(lambda: torch.save(model, io.BytesIO())),
        refusal(lambda: torch.save(model.module, io.BytesIO())),
    ]
    second = ZeRO3(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    second.load_full_state_dict(model.full_state_dict())  # what the sentence says
    x = torch.randn(3, 4)
    assert torch.equal(model.eval()(x), second.eval()(x))
    assert all("cannot be copied or pickled; save its full_state_dict()" in one for one in said)


@pytest.mark.parametrize("how", ["function", "method"])
@on_each_rank("world")
def test_torch_compile_of_a_wrapped_model_leaves_it_as_it_is(how: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    reference, model = copy.deepcopy(module), ZeRO3(module)
    compiled: Any = torch.compile(model) if how == "function" else model
    if how == "method":
        model.compile()
    x = torch.randn(2, 4, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        y = compiled(x)
        y.sum().backward()
    expected = reference(x)
    expected.sum().backward()
    whole = dict(reference.named_parameters())
    worst = float((y - expected).abs().max())
    for p in model.owned():
        assert p.tensor.grad is not None
        worst = max(worst, float((p.tensor.grad - _part(whole[p.name].grad, p)).abs().max()))
    seen = [str(one.message) for one in seen]
    assert worst < 1e-12 and seen == []


@on_each_rank("world")
def test_a_compiled_module_is_refused() -> None:
    method = nn.Sequential(nn.Linear(4, 4))
    method[0].compile()
    some = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4)))
    every = (torch.compile(nn.Linear(4, 4)), method, some)
    said = [refusal(lambda one=one: ZeRO3(one)) for one in every]
    assert all("wrap the plain module" in one for one in said)


def test_the_whole_state_is_whole_around_a_compiled_model_too(world: World) -> None:
    """`torch.compile` hides that the model is ZeRO3; a state dict of shards looks like a state."""

    def run() -> str:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        right = {name: x.clone() for name, x in module.state_dict().items()}
        model = ZeRO3(module)
        compiled: Any = torch.compile(model, backend="eager")
        for one in (model, compiled):
            found = full_state_dict(one)
            assert found.keys() == right.keys()
            assert all(torch.equal(found[name], x) for name, x in right.items())
        return refusal(lambda: full_state_dict(nn.Sequential(model)))

    assert all("has a ZeRO3 inside" in said for said in world.run(run))
