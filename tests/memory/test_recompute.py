"""Recomputation: the same gradients from the published bytes; functions that change are refused."""

import gc
import random
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from labkit import predict, record
from labkit.dispatch import DispatchMode
from labkit.memory.edits import Recompute, recompute
from labkit.memory.flash_attention import FlashAttention
from labkit.memory.policies import keep_products
from labkit.models import GPT, PlainAttention
from labkit.precision.autocasting import autocast
from recorded_memory import layer_bytes, recorded_step, use_core, without_collector
from tables import cases, raises

Edit = Callable[[GPT], object]


def as_torch_does(model: GPT) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def keep_draws(op: Any) -> bool:
    return "dropout" in str(op) or "bernoulli" in str(op)


EDITS: dict[str, Edit] = {
    "full": Recompute,
    "some": lambda model: Recompute(model, blocks=model.blocks[:1]),
    "selective": lambda model: Recompute(model, what="selective"),
    "products kept": lambda model: Recompute(model, what=keep_products),
    "draws kept": lambda model: Recompute(model, what=keep_draws),
    "all kept": lambda model: Recompute(model, what=lambda op: True),
    "none kept": lambda model: Recompute(model, what=lambda op: False),
    "numbers compared": lambda model: Recompute(model, check="values"),
    "torch's": as_torch_does,
}


def trained(edit: Edit, dtype: torch.dtype, plain: bool, dropout: float = 0.2) -> list[Tensor]:
    """Loss, gradients, and what is drawn after the step."""
    torch.manual_seed(0)
    model = GPT.preset("tiny", kv_heads=2, dropout=dropout).to(dtype)
    if plain:
        use_core(model, lambda: PlainAttention(dropout))
    edit(model)
    tokens = torch.randint(256, (2, 16))
    loss = model(tokens).square().mean()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == len(list(model.parameters()))
    return [loss.detach(), *grads, torch.rand(3)]


@cache
def trained_without(dtype: torch.dtype, plain: bool) -> list[Tensor]:
    return trained(lambda model: None, dtype, plain)


def same(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(map(torch.equal, these, those)) and len(these) == len(those)


@pytest.mark.parametrize("plain", [False, True])
@cases(
    *((edit, torch.float32) for edit in EDITS),
    *((edit, torch.float64) for edit in ("full", "selective", "products kept")),
    ("full", torch.bfloat16),
)
def test_gradients_and_masks_are_those_without_bit_for_bit(
    edit: str, dtype: torch.dtype, plain: bool
) -> None:
    assert same(trained(EDITS[edit], dtype, plain), trained_without(dtype, plain))


# ---- any function


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (4, 4), generator=generator, dtype=torch.float64).requires_grad_()


def call(fn: Callable[..., Any], *args: Any) -> Any:
    """As `recompute` is called, and with nothing computed again."""
    return fn(*args)


class Twice(torch.autograd.Function):
    """A user's own, which keeps more than one tensor and asks for them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, x * y)
        return x * x * y

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        x, _, xy = ctx.saved_tensors
        return 2 * xy * dout, ctx.saved_tensors[0] * x * dout


def catches_every_exception(x: Tensor, y: Tensor) -> Any:
    """No user catches the end of the second run."""
    try:
        return x.sin().exp() * y
    except Exception:
        return x


def in_place_inside(x: Tensor, y: Tensor) -> Any:
    z = (x @ y).add_(1).sigmoid_() * y
    z[0] = x[1]
    return z.add_(x).sin()


def nested(x: Tensor, y: Tensor) -> Any:
    inner = recompute(lambda a: recompute(torch.sin, a @ y).cos(), x * y)
    return recompute(lambda a, *, b: (a.exp() * b).tanh(), inner, b=x)


def backward_inside(x: Tensor, y: Tensor) -> Any:
    z = (x.sin() * y).cos()
    (dx,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return z * dx.exp()


def not_all_needed(x: Tensor, y: Tensor) -> Any:
    (x * 3).exp().sum().detach()
    return x.sin() @ y.detach() + y.exp().detach()


def in_place_behind_a_product(x: Tensor, y: Tensor) -> Any:
    """aten._unsafe_view hands out the product's memory under a count of its own."""
    z = x.unsqueeze(0).expand(2, 4, 4) @ y
    return z.mul_(2).exp() + z.sin()


FUNCTIONS = {
    "several outputs": lambda x, y: {"a": (x @ y).tanh(), "b": [y.exp(), 3, x.sin().T]},
    "catches every exception": catches_every_exception,
    "used twice": lambda x, y: (x @ x).sin() * x + recompute(torch.exp, x) * y,
    "in place inside": in_place_inside,
    "in place behind a product": in_place_behind_a_product,
    "nested": nested,
    "backward inside": backward_inside,
    "not all needed": not_all_needed,
    "its own Function": Twice.apply,
    "dropout": lambda x, y: F.dropout(x.sin(), 0.5) @ F.dropout(y, 0.3).exp(),
    "a view": lambda x, y: x.T[1:],
    "the input": lambda x, y: (x, y.sin()),
    "normalised": lambda x, y: F.layer_norm((x @ y).sin(), (4,)) * y,
}
POLICIES = {"all again": None, "keep all": lambda op: True, "products": keep_products}


def total(output: Any) -> Tensor:
    leaves = torch.utils._pytree.tree_leaves(output)
    return sum((i + x.sin().sum() * (i + 2)) for i, x in enumerate(leaves) if hasattr(x, "sin"))


def first_and_second(run: Callable[..., Any], fn: Callable[..., Any]) -> list[Tensor]:
    """Gradients of two backwards over one graph, of a third whose own graph is kept, and theirs."""
    torch.manual_seed(1)
    given = [leaf(seed=0), leaf(seed=1)]
    z = total(run(fn, *given))
    ask = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)
    found = [*ask(z, given, retain_graph=True), *ask(z, given, retain_graph=True)]
    first = ask(z, given, create_graph=True)
    return [z.detach(), *found, *ask(sum(x.sin().sum() for x in first), given), torch.rand(2)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_function_and_any_number_of_backwards(name: str, policy: str) -> None:
    fn = FUNCTIONS[name]
    run = partial(recompute, policy=POLICIES[policy])
    without = first_and_second(call, fn)
    if name == "its own Function":  # it has no second derivative that counts
        without = without[:-3]
    for again, expected in zip(first_and_second(run, fn), without, strict=False):
        torch.testing.assert_close(again, expected, rtol=1e-13, atol=1e-13)


def test_outputs_may_go_backward_one_after_the_other() -> None:
    x, y = leaf(), leaf(seed=1)
    for out in recompute(lambda x, y: (x.sin().exp(), y.sin().exp()), x, y):
        out.sum().backward()
    for one in (x, y):
        assert torch.allclose(one.grad, one.sin().exp() * one.cos())


def test_arguments_of_any_kind() -> None:
    seen = []

    def fn(a: dict[str, Any], *rest: Any, how: str, scale: Tensor) -> Tensor:
        seen.append((how, rest, sorted(a)))
        return a["x"][0].sin() * scale + a["n"]

    x, scale = leaf(), leaf(seed=1)
    out = recompute(fn, {"x": [x], "n": 3}, None, 4.5, how="so", scale=scale)
    out.sum().backward()
    assert seen == [("so", (None, 4.5), ["n", "x"])] * 2
    assert torch.allclose(x.grad, x.cos() * scale)
    assert torch.allclose(scale.grad, x.sin())


def test_without_gradients_nothing_is_done() -> None:
    calls = []

    def fn(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return x.sin()

    with torch.no_grad():
        assert not recompute(fn, leaf()).requires_grad
    with torch.inference_mode():
        recompute(fn, torch.ones(2))
    assert not recompute(fn, torch.ones(2)).requires_grad
    assert calls == [False, False, True]


def test_parameters_get_gradients_where_no_input_has_one() -> None:
    layer, x = nn.Linear(4, 4).double(), leaf().detach()
    again, right = (
        torch.autograd.grad(run(layer, x).square().sum(), layer.weight) for run in (recompute, call)
    )
    assert torch.equal(*again, *right)


class Ran(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_one_backward_runs_it_once_more_and_a_policy_runs_less() -> None:
    ran = {}
    for what in ("none", "full", "selective", keep_products):
        torch.manual_seed(0)
        model = GPT.preset("tiny")
        if what != "none":
            Recompute(model, what=what)
        loss = model(torch.zeros(1, 16, dtype=torch.long)).sum()
        with Ran() as ran[what]:
            loss.backward()

    def times(what: Any, name: str) -> int:
        return ran[what].names.count(name) - ran["none"].names.count(name)

    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    assert times("full", "addmm") == 2 * 5, "it stops before the last of six: all is there"
    assert times("full", "gelu") == 2 and times("full", kernel) == 2
    assert times("selective", "addmm") == 0 and times("selective", kernel) == 2
    assert times(keep_products, "addmm") == 0 and times(keep_products, kernel) == 0
    assert times(keep_products, "gelu") == 2


# ---- random numbers


def masks(device: str = "cpu", **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Those of forward, and those of backward."""
    drawn: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        for p in (0.5, 0.3):
            x = torch.native_dropout(x, p, True)[0]
            drawn.append(x != 0)
            x = x.sin()
        return x

    y = recompute(fn, leaf(30, 30).to(device), **options)
    torch.rand(5, device=device)
    y.sum().backward()
    return drawn[:2], drawn[2:]


@pytest.mark.parametrize("policy", [None, keep_draws])
def test_the_same_masks_are_drawn_again(policy: Any) -> None:
    assert same(*masks(policy=policy))


@pytest.mark.gpu
def test_the_same_masks_are_drawn_again_on_a_gpu() -> None:
    assert same(*masks("cuda"))


def test_a_kept_draw_leaves_the_generator_as_if_it_had_been_drawn() -> None:
    first: list[bool] = []
    assert same(
        *masks(policy=lambda op: keep_draws(op) and (first.append(True), len(first) == 1)[1])
    )


@pytest.mark.parametrize("policy", [None, keep_draws])
def test_generators_of_gpus_are_known_wherever_the_inputs_are(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the CPU's stands for that of a GPU. It goes back if it has drawn, and only then."""
    stand_in, drawn = torch.Generator().manual_seed(0), list[Tensor]()
    monkeypatch.setattr(torch.cuda, "default_generators", (stand_in,))

    def fn(x: Tensor) -> Tensor:
        drawn.append(torch.rand(4, 4, generator=stand_in))
        return (x * drawn[-1]).sin()

    y = recompute(fn, leaf(), policy=policy)
    z = recompute(lambda x: torch.native_dropout(x, 0.5, True)[0].sin(), leaf(), policy=policy)
    torch.rand(4, generator=stand_in)
    state = stand_in.get_state()
    (y.sum() + z.sum()).backward()
    assert torch.equal(*drawn) and torch.equal(stand_in.get_state(), state)


def test_without_preserve_rng_they_are_others() -> None:
    forward, backward = masks(preserve_rng=False)
    assert not torch.equal(forward[0], backward[0])


def test_random_numbers_drawn_later_are_unchanged() -> None:
    def drawn(run: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(0)
        y = run(partial(F.dropout, p=0.5), leaf()).sum()
        torch.rand(3)
        y.backward()
        return torch.rand(4)

    assert torch.equal(drawn(recompute), drawn(call))


def test_the_generator_is_put_back_after_an_error_too() -> None:
    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5).sin()
        if torch._C._current_graph_task_id() != -1:
            raise KeyError("mine")
        return y.cos()

    y = recompute(fn, leaf()).sum()
    torch.rand(3)
    state = torch.get_rng_state()
    raises("mine", y.backward, error=KeyError)
    assert torch.equal(state, torch.get_rng_state())
    raises("", y.backward, error=KeyError)  # and again: nothing is left half done


# ---- casts and modes


@pytest.mark.parametrize("region", [partial(torch.autocast, "cpu"), autocast])
@pytest.mark.parametrize("policy", POLICIES)
def test_casts_are_the_same_again(policy: str, region: Callable[..., Any]) -> None:
    """Both torch's autocast and ours are off when backward runs, as they should be."""

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

        def twice(x: Tensor) -> Tensor:
            y = F.gelu(layer(x)).logsumexp(-1, keepdim=True) + layer(x)
            with region(enabled=False):
                return F.linear(y, y.detach().to(y.dtype)[:, :8])

        with region(dtype=torch.bfloat16):
            layer(x)  # the weight is cast, and its copy used again
            y = run(twice, x)
        y.float().square().sum().backward()
        return [y.detach(), layer.weight.grad, x.grad]

    assert same(gradients(partial(recompute, policy=POLICIES[policy])), gradients(call))


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is Tensor.sin else out


class OnlyOnce(Doubled):
    def __init__(self) -> None:
        super().__init__()
        self.entered_again = Doubled


@pytest.mark.parametrize("mode", [Doubled, OnlyOnce])
def test_modes_are_entered_again(mode: Callable[[], TorchFunctionMode]) -> None:
    x = leaf()
    with mode():
        y = recompute(lambda x: x.sin().exp(), x)
    y.sum().backward()
    expected = (2 * x.sin()).exp() * 2 * x.cos()
    assert torch.allclose(x.grad, expected)


def test_a_default_device_is_that_of_forward() -> None:
    runs = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            x = leaf().to(device).detach().requires_grad_()
            y = recompute(lambda x: x.sin() * torch.ones(4, dtype=torch.float64), x)
            runs.append((device, x, y))
    for device, x, y in runs:
        y.sum().backward()
        assert x.grad is not None and x.grad.device.type == y.device.type == device
    assert torch.equal(runs[0][1].grad, runs[0][1].cos())


# ---- what is kept, counted by the recorder

ROWS, SEQUENCE, WIDTH, HEADS = 2, 32, 64, 4


def kept_bytes_of_a_layer(edit: Edit) -> float:
    return layer_bytes(recorded_step, SEQUENCE, ROWS, WIDTH, HEADS, edit=edit)


def in_plain(edit: str) -> Edit:
    """The edit after attention has become plain; "none" is none."""
    return lambda model: EDITS.get(edit, use_core)(use_core(model))


def torchs_kernel(model: GPT) -> None:
    """The model's own core; torch's CPU has a kernel only without dropout in it."""
    for block in model.blocks:
        block.attn.core.dropout = 0.0


KERNELS: dict[str, Edit] = {
    "torch's kernel": torchs_kernel,
    "labkit's kernel": lambda model: use_core(model, FlashAttention),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["none", "selective", "full", *KERNELS])
def test_a_layer_keeps_the_bytes_that_are_published(what: str) -> None:
    sizes = SEQUENCE, ROWS, WIDTH, HEADS
    if what in KERNELS:
        edit, expected = KERNELS[what], predict.flash_activation_bytes(*sizes)
    else:
        edit, expected = in_plain(what), predict.activation_bytes(*sizes, recompute=what)
    rest = kept_bytes_of_a_layer(edit) - expected
    # Mean and deviation of two norms, which the formula leaves out.
    statistics = 0 if what == "full" else 2 * 2 * ROWS * SEQUENCE
    assert rest in (2 * statistics, 4 * statistics), "2 bytes each, or 4"


def test_a_policy_keeps_its_results_and_no_more() -> None:
    """The products of a layer have 2(3 + 1 + 4 + 1)sbh; its core is plain here: 2as/h, and what v
    makes of it, 2. The input is 2."""
    kept_bytes = kept_bytes_of_a_layer(in_plain("products kept"))
    of_sbh = 2 + 18 + 2 + 2 * HEADS * SEQUENCE / WIDTH
    assert kept_bytes == SEQUENCE * ROWS * WIDTH * of_sbh


def test_hooks_from_outside_see_the_inputs_and_only_those() -> None:
    seen: list[Tensor] = []

    def save(x: Tensor) -> tuple[Tensor]:
        seen.append(x)
        return (x.clone(),)

    x = leaf()
    with saved_tensors_hooks(save, lambda packed: packed[0]):
        y = recompute(lambda x, n: x.sin().exp() * n, x, 3)
    assert len(seen) == 1 and torch.equal(seen[0], x)
    y.sum().backward()
    assert torch.allclose(x.grad, 3 * x.sin().exp() * x.cos())


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_held_when_backward_is_over(policy: str) -> None:
    """No cycle that only Python's collector, or nothing, could free."""

    class Big:
        pass

    def run(backwards: int) -> bool:
        big = Big()
        x = leaf()
        y = recompute(lambda x, big: (x @ x).sin().exp() @ x, x, big, policy=POLICIES[policy]).sum()
        for i in range(backwards):
            y.backward(retain_graph=i + 1 < backwards)
        gone = weakref.ref(big)
        del big
        if not backwards:
            del y
        return gone() is None

    with without_collector():
        assert run(0) and run(1) and run(2)


def test_memory_of_the_second_run_is_let_go() -> None:
    """Also while the graph is kept for another backward."""

    def tensors() -> list[Tensor]:
        return [thing for thing in gc.get_objects() if type(thing) is Tensor]

    x, before = leaf(), tensors()
    y = recompute(lambda x: (x.sin() @ x).exp(), x).sum()
    y.backward(retain_graph=True)
    known = {id(one) for one in (*before, x, x.grad, y)}
    assert not [one.shape for one in tensors() if id(one) not in known and one.numel()]


# ---- functions that cannot be run again


# what is computed by call k, options, and what is said of the second
CHANGED: dict[str, tuple[Callable[[Tensor, int], Tensor], dict[str, Any], str]] = {
    "fewer tensors": (
        lambda x, k: x.sin() if k == 2 else x.sin().exp(), {},
        r"the rerun saved 1 tensors, but forward 2",
    ),
    "more tensors": (
        lambda x, k: x.sin().exp() if k == 2 else x.sin(), {"check": "values"},
        "more tensors than forward, which saved 1",
    ),
    "another shape": (
        lambda x, k: x.sin()[:k].exp(), {},
        r"saved tensor 2 of 2 is \[2, 4\] float64 on cpu, but was \[1, 4\] float64 on cpu in "
        r"forward.*Let it depend only on its arguments",
    ),
    "another type": (
        lambda x, k: x.to(torch.float32 if k == 2 else torch.float64).exp(), {},
        r"\[4, 4\] float32 on cpu, but was \[4, 4\] float64",
    ),
    "other numbers beside infinities": (
        lambda x, k: x * torch.tensor([k, 0, 0, -torch.inf]), {"check": "values"},
        "with fingerprint",
    ),
    "more calls under a policy": (
        lambda x, k: [x.detach() @ x.detach() for _ in range(k)] and x.sin(),
        {"policy": lambda op: True},
        "made call 2 of aten.mm.default, but forward made only 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", CHANGED)
def test_a_function_that_changes_between_its_runs_is_reported(how: str) -> None:
    compute, options, says = CHANGED[how]
    calls = iter((1, 2))
    y = recompute(lambda x: compute(x, next(calls)), leaf(), **options)
    raises(says, y.sum().backward)


def test_other_values_are_reported_on_request() -> None:
    random.seed(0)

    def scaled(x: Tensor) -> Tensor:
        return (x.sin() * random.random()).exp()  # not torch's generator

    recompute(scaled, leaf()).sum().backward()  # wrong, and not noticed
    with pytest.raises(ValueError, match="saved tensor 2 of 2 is .* with fingerprint"):
        recompute(scaled, leaf(), check="values").sum().backward()


NAN = torch.full((3, 2), torch.nan)


@cases(
    (lambda x: x.sin().exp().real, NAN.to(torch.complex64)),
    (lambda x: x.sin().exp().real, NAN.bfloat16()),
    (lambda x: (x.mH @ x).real, leaf().to(torch.complex64)),
    (lambda x: (x * torch.tensor([1, 2, torch.inf, -torch.inf])).sigmoid(), leaf()),
    ids=["NaN, complex", "NaN, bfloat16", "conjugated", "infinities"],
)
def test_any_numbers_can_be_compared(fn: Callable[[Tensor], Tensor], x: Tensor) -> None:
    recompute(fn, x.requires_grad_(), check="values").sum().backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_parameter_changed_before_backward_is_refused_as_without(policy: str) -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    for run in (call, partial(recompute, policy=POLICIES[policy])):
        y = run(layer, leaf()).sum()
        with torch.no_grad():
            layer[1].weight.mul_(3)
        raises("modified by an inplace operation", y.backward, error=RuntimeError)


def test_an_input_changed_in_place_is_reported() -> None:
    y = leaf(seed=1).detach()
    words = r"changed its input tensor 2 of 2, \[4, 4\] float64"
    raises(words, recompute, lambda x, y: x.sin() * y.add_(1), leaf(), y)


def test_an_input_changed_later_is_reported_as_by_autograd() -> None:
    x = leaf() * 1
    y = recompute(torch.sin, x)
    x.add_(1)
    error = raises("inplace operation", y.sum().backward, error=RuntimeError)
    assert "recompute needs this input" in error.__notes__[0]


def test_a_tensor_changed_by_the_function_is_refused_as_without() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sigmoid()
        y[0] = 1.0
        return y.exp()

    out = fn(leaf()).sum()
    raises("modified by an inplace operation", out.backward, error=RuntimeError)
    out = recompute(fn, leaf()).sum()
    raises(r"changed in place a tensor that backward needs, \[4, 4\]", out.backward)


def test_a_kept_result_that_the_user_changed_is_reported() -> None:
    kept: list[Tensor] = []

    def hands_out(x: Tensor) -> Tensor:
        kept.append(x @ x)
        return kept[0].sin()

    y = recompute(hands_out, leaf(), policy=keep_products)
    with torch.no_grad():
        kept[0].add_(1)
    raises("the kept result of aten.mm.default was changed in place", y.sum().backward)


@pytest.mark.parametrize("bias", [False, True])
def test_a_batched_matmul_that_the_user_changed_is_reported(bias: bool) -> None:
    layer = nn.Linear(4, 4, bias=bias)

    def hands_out(x: Tensor) -> tuple[Tensor, Tensor]:
        h = layer(x)
        return h, h.sigmoid()

    h, y = recompute(hands_out, torch.ones(2, 3, 4), policy=keep_products)
    h += 1
    raises("kept result of .* was changed in place", (h.sum() + y.sum()).backward)


def test_a_policy_goes_with_sparse_tensors() -> None:
    x, one = leaf(), torch.eye(4).double().to_sparse()
    recompute(lambda x: torch.sparse.mm(one, x).sin(), x, policy=keep_products).sum().backward()
    assert torch.allclose(x.grad, x.cos())


def test_errors_of_the_function_pass_through() -> None:
    raises("missing", recompute, lambda x: {}["missing"], leaf(), error=KeyError)
    x = leaf()  # and nothing is left behind
    x.sin().sum().backward()
    assert torch.equal(x.grad, x.cos())


def test_unknown_options_and_models_without_blocks_are_refused() -> None:
    raises(
        'check=.all.: choose "shapes", "values" or "none"',
        recompute,
        torch.sin,
        leaf(),
        check="all",
    )
    tiny = GPT.preset("tiny")
    raises('what=.half.: choose "full", "selective" or a policy', Recompute, tiny, what="half")
    raises(r"Linear has no ModuleList.*blocks=\[...\]", Recompute, nn.Linear(2, 2))
    layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2)])
    raises("no module 'attn.core'.*core=.*self_attn", Recompute, layers, what="selective")


# ---- the edit of a model


def test_an_edit_changes_no_name_and_can_be_taken_back() -> None:
    model = GPT.preset("tiny")
    names, forwards = list(model.state_dict()), [block.forward for block in model.blocks]
    with Recompute(model):
        assert list(model.state_dict()) == names
        assert all(hasattr(block.forward, "runs_again_in_backward") for block in model.blocks)
        raises("this Block is already recomputed", Recompute, model, blocks=model.blocks[1:])
    assert [block.forward for block in model.blocks] == forwards
    assert "forward" not in vars(model.blocks[0])


def test_a_core_that_blocks_share_is_edited_once() -> None:
    model = GPT.preset("tiny")
    model.blocks[1].attn.core = core = model.blocks[0].attn.core
    with Recompute(model, what="selective"):
        assert not hasattr(core.forward.fn, "fn")
    assert "forward" not in vars(core)


def test_a_users_own_model() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()

    def grads() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        model(leaf(2, 5, 8)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    without = grads()
    for options in ({}, {"what": "selective", "core": "self_attn"}):
        with Recompute(model, **options):
            assert same(grads(), without)


def test_a_recording_shows_forward_inside_backward() -> None:
    model = GPT.preset("tiny")
    Recompute(model)
    with record() as trace:
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    spans = trace.ranks[0].spans
    (whole,) = (x for x in spans if x.phase == "backward" and x.module == "")
    spans = sorted((x for x in spans if x.began_s > whole.began_s), key=lambda x: x.began_s)
    again = [x.module for x in spans if x.phase == "forward"]
    assert again == [
        f"blocks.{i}.{part}"
        for i in (1, 0)
        for part in (
            "norm1", "attn", "attn.q", "attn.k", "attn.v", "attn.core", "attn.out", "dropout",
            "norm2", "mlp", "mlp.up", "mlp.down",
        )
    ]  # fmt: skip
