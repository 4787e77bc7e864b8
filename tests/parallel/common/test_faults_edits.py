"""Model edits and autocast on torch users' modules: as torch computes, or refused by name."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit import Comm, autocast, dry_run, full_state_dict, recompute, tensor_parallel
from small_models import Custom
from tables import cases, raises
from worlds import on_each_rank, world_fixture

world, world1 = world_fixture(2, device="cpu"), world_fixture(1)
LOW = torch.bfloat16
REGIONS = {"torch": partial(torch.autocast, "cpu", LOW), "labkit": autocast}


class Attention(nn.Module):
    """With the rotary embedding of transformers' Llama: its angles are computed in fp32."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        inv_freq = 10_000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[1])[None, None].float()
        with torch.autocast(device_type=x.device.type, enabled=False):
            freqs = (self.inv_freq[None, :, None] @ positions).transpose(1, 2)
            emb = torch.cat((freqs, freqs), -1)
            return emb.cos().to(x.dtype), emb.sin().to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.angles(x)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for y in self.qkv(x).chunk(3, -1))  # fmt: skip

        def turned(y: Tensor) -> Tensor:
            low, high = y.chunk(2, -1)
            return y * cos + torch.cat((-high, low), -1) * sin

        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def run(region: Any, model: nn.Module, x: Tensor, around: Any = None) -> list[Tensor]:
    """The output and all gradients; backward runs outside of the region."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    with region():
        y = around(model, x) if around else model(x)
    y.float().square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    return [g for g in found if g is not None]


def same_as_torchs(model: nn.Module, x: Tensor, around: Any = None) -> bool:
    ours, torchs = (run(REGIONS[name], model, x, around) for name in ("labkit", "torch"))
    assert len(ours) == len(torchs) > 1
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


def test_rotary_angles_outside_of_autocast_are_exact_at_1500_positions() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(1, 1500, 16)
    with autocast():
        cos, _ = model.angles(x)
    assert torch.equal(cos, model.angles(x)[0])
    assert same_as_torchs(model, x)


class Switches(nn.Module):
    """Products under each switch. `c` is used in one type, and x is no leaf, for torch's cache."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    @torch.autocast("cpu", enabled=False)
    def _off(self, x: Tensor) -> Tensor:
        return self.a(x.float())

    @torch.autocast("cpu", torch.float16)
    def _half(self, x: Tensor) -> Tensor:
        return self.c(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        ys = [self.a(x), self._off(x), self._half(x)]
        with torch.autocast("cpu", enabled=False):
            ys.append(self.b(x))
            with torch.autocast("cpu", torch.float16):
                ys += [self.c(x), self._off(x)]
            with torch.autocast("cpu", enabled=True, cache_enabled=False):
                ys += [self.b(x), self.b(x)]
            ys.append(x @ self.a.weight)
        ys.append(self.a(x))
        self.types = [y.dtype for y in ys]
        return torch.stack([y.float() for y in ys])


def test_torchs_switches_inside_work_nested_and_as_decorators() -> None:
    torch.manual_seed(0)
    model, x = Switches(), torch.randn(4, 8)
    assert same_as_torchs(model, x)
    with autocast():
        model(x)
    fp32, fp16 = torch.float32, torch.float16
    assert model.types == [LOW, fp32, fp16, fp32, fp16, fp32, LOW, LOW, fp32, LOW]


class Squared(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] @ w.t(), x.t() @ grads[0]


def test_custom_fwd_sees_the_region() -> None:
    torch.manual_seed(0)
    model = Custom(lambda m, x: Squared.apply(m.linear(x), m.linear.weight), linear=nn.Linear(8, 8))
    assert same_as_torchs(model, torch.randn(4, 8))


AGAIN = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "labkit": recompute,
}


@pytest.mark.parametrize("how", AGAIN)
@pytest.mark.parametrize("kind", [Attention, Switches])
def test_a_checkpoint_computes_again_in_the_same_types(kind: Any, how: str) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 5, 16 if kind is Attention else 8)
    assert same_as_torchs(model, x, AGAIN[how])
    plain, again = (run(autocast, model, x, around) for around in (None, AGAIN[how]))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_what_is_inside_of_ops_in_cpp_is_cast_as_torchs_does() -> None:
    torch.manual_seed(0)
    assert same_as_torchs(nn.Linear(8, 8), torch.randn(2, 8), lambda model, x: torch.ops.aten.mm(
        x, model.weight))  # fmt: skip
    lstm, x = nn.LSTM(8, 8, batch_first=True), torch.randn(2, 3, 8)
    try:
        with torch.autocast("cpu", LOW):
            lstm(x)
    except RuntimeError as error:
        pytest.skip(f"torch has no LSTM in {LOW} on this CPU ({error})")
    assert same_as_torchs(lstm, x, lambda model, x: model(x)[0])


def states() -> list[Any]:
    kinds = ("cpu", "cuda")
    found = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return [*found, torch.is_autocast_cache_enabled()]


def test_a_region_leaves_torchs_switches_as_they_were() -> None:
    before = states()
    with pytest.raises(KeyError), autocast(torch.float16):
        assert states()[0] == (True, torch.float16)
        with autocast(enabled=False):
            assert not torch.is_autocast_enabled("cpu")
        raise KeyError
    with torch.autocast("cpu", torch.float16):
        inside = states()
        with autocast(LOW):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == LOW
        assert states() == inside
        with autocast(enabled=False):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    raises("cannot run ops in", autocast(torch.float32).__enter__)
    assert states() == before


@cases(
    (torch.float8_e4m3fn, "product", (1, 2, 40)),  # on 2 ranks, 2 elements are sent one by one
    (torch.float8_e5m2, "product", (1, 0)),
    (torch.complex32, "mean", (1, 5)),
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@on_each_rank("world")
def test_a_reduction_that_torch_lacks_is_refused(dtype: torch.dtype, op: Any, sizes: Any) -> None:
    for numel in sizes:
        x = torch.ones(numel).to(dtype)
        raises((f"torch has no {op} of {dtype}; convert it first",), Comm().all_reduce, x, op)
        Comm().all_reduce(after := torch.ones(3))
        assert after[0].item() == 2.0, "the group is as good as before"


def mlp(code: Callable[[Any, Tensor], Any], up: int = 24) -> Callable[[], nn.Module]:
    """8 features and 24 hidden ones."""
    return lambda: Custom(code, up=nn.Linear(8, up), down=nn.Linear(24, 8))


def fused(m: Any, x: Tensor) -> Tensor:
    a, b = m.up(x).chunk(2, -1)
    return m.down(F.silu(a) * b)


def interleaved(m: Any, x: Tensor) -> Tensor:
    """Gate and up take turns: each rank's slice has whole pairs, so it can be cut."""
    a, b = m.up(x).unflatten(-1, (-1, 2)).unbind(-1)
    return m.down(F.silu(a) * b)


def low_rank() -> nn.Module:
    ends = {"down": nn.Linear(8, 4), "up": nn.Linear(4, 8)}
    return Custom(lambda m, x: x + m.up(m.down(x)), **ends)


def without_biases() -> nn.Module:
    ends = {"up": nn.Linear(8, 24, bias=False), "down": nn.Linear(24, 8, bias=False)}
    return Custom(lambda m, x: m.down(F.silu(m.up(x), inplace=True)).mul_(2), **ends)


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 4)).transpose(1, 2)


def attention(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(y.transpose(1, 2).flatten(2))


def heads(
    split: Callable[[Tensor], Tensor] = split_heads,
    adapt: Callable[..., Any] = lambda m, q, k, v: (q, k, v),
    kv_heads: int = 4,
    forward: Any = None,
    **parts: Any,
) -> Callable[[], nn.Module]:
    """4 heads of width 4; `adapt` changes queries, keys and values before they meet."""

    def plain(m: Any, x: Tensor) -> Tensor:
        return attention(m, *adapt(m, split(m.q(x)), split(m.k(x)), split(m.v(x))))

    def make() -> nn.Module:
        ends = {"q": nn.Linear(8, 16), "out": nn.Linear(16, 8), "head_width": 4}
        keys = {name: nn.Linear(8, 4 * kv_heads) for name in "kv"}
        return Custom(forward or plain, **ends, **keys, **parts)

    return make


def rotary(wrong: bool = False) -> Callable[[], nn.Module]:
    """It takes more than x, so that it is tried on the first real input."""

    def forward(m: Any, x: Tensor, cos: Tensor, *, scale: Tensor) -> Tensor:
        q, k, v = m.q(x), m.k(x), m.v(x)
        q = q.flip(-1) if wrong else q
        return attention(m, split_heads(q) * cos, split_heads(k) * cos * scale, split_heads(v))

    return heads(forward=forward, takes_more=True)


def grouped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)


def tiled(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return q, *(x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))


def around(layer: nn.Module) -> Any:
    def forward(model: Any, x: Tensor) -> Any:
        if hasattr(model.layer, "takes_more"):
            return x + model.layer(x, torch.linspace(0, 1, 4), scale=torch.tensor(0.5))
        return x + model.layer(x)

    return Custom(forward, layer=layer)


HAND = "shard it by hand with ColumnParallelLinear"
REFUSED = {
    "fused gate": (mlp(fused, up=48), "computes wrong values on a slice"),
    "down before up": (low_rank, "by the features between up and down"),
    "softmax": (mlp(lambda m, x: m.down(m.up(x).softmax(-1))), "wrong values on a slice"),
    "norm": (mlp(lambda m, x: m.down(F.layer_norm(m.up(x), (24,)))), "forward fails on a slice"),
    "norm of what is there": (
        mlp(lambda m, x: m.down(F.normalize(m.up(x), dim=-1))), "wrong values on a slice"),
    "hidden sliced": (mlp(lambda m, x: m.down(F.pad(m.up(x)[..., :12], (0, 12)))), "layer"),
    "hidden added to x": (
        mlp(lambda m, x: m.down(m.up(x) + x.repeat(1, 1, 3))), "more than these features"),
    "scaled by x": (
        mlp(lambda m, x: m.down(m.up(x) * x.mean(-1, keepdim=True))), "more than these features"),
    "hidden in the output": (
        mlp(lambda m, x: m.down(h := m.up(x)) + h.mean(-1, keepdim=True)), "wrong values on"),
    "weight used directly": (
        mlp(lambda m, x: m.down(F.linear(x, m.up.weight, m.up.bias))), "does not call up"),
    "dropout that never ends": (mlp(lambda m, x: m.down(F.dropout(m.up(x)))), "wrong values"),
    "rows first, too": (mlp(lambda m, x: m.down(m.up(m.down(m.up(x).flip(-1))))), "wrong values"),
    "fixed heads": (
        heads(lambda x: x.unflatten(-1, (4, -1)).transpose(1, 2)), "between q, k, v and out"),
    "heads last": (  # the features of a head do not lie side by side
        heads(lambda x: x.unflatten(-1, (4, -1)).permute(0, 3, 1, 2)), "wrong values on a slice"),
    "tiled groups": (heads(adapt=tiled, kv_heads=2), "wrong values on a slice"),
    "slopes of all heads": (
        heads(adapt=lambda m, q, k, v: (q * m.slopes, k, v),
              slopes=nn.Buffer(torch.arange(4.0)[:, None, None])),
        "forward fails on a slice"),
    "norm of all heads": (
        heads(lambda x: split_heads(F.layer_norm(x, x.shape[-1:]))), "wrong values on a slice"),
    "on the first input": (rotary(wrong=True), "wrong values on a slice"),
    "no forward": (lambda: nn.ModuleDict(dict(mlp(fused)().named_children())), "it has no forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@on_each_rank("world")
def test_a_layer_that_would_compute_something_else_is_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    make, words = REFUSED[name]
    model = around(make())

    def forward() -> Tensor:
        return tensor_parallel(model, Comm())(torch.randn(2, 3, 8))

    assert str(raises((words, HAND), forward)).startswith("tensor_parallel cannot shard layer, a ")


CUT = {
    "plain": mlp(lambda m, x: m.down(F.gelu(m.up(x)))),
    "square, in place": mlp(lambda m, x: m.down(m.up(x).relu_().square())),
    "in place, without biases": without_biases,
    "used twice": mlp(lambda m, x: m.down(m.up(m.down(F.relu(m.up(x)))).tanh())),
    "two inputs": mlp(lambda m, x: m.down(F.relu(m.up(x)) * m.up(x * 2))),
    "residual inside": mlp(lambda m, x: x.mul(2) + m.down(F.silu(m.up(F.layer_norm(x, (8,)))))),
    "interleaved gate": mlp(interleaved, up=48),
    "attention": heads(),
    "grouped": heads(adapt=grouped, kv_heads=2),
    "norm of a head": heads(lambda x: F.layer_norm(split_heads(x), (4,))),
    "more inputs": rotary(),
}


def trained(make: Callable[[], nn.Module], cut: bool) -> dict[str, Tensor]:
    """Weights, output and the gradient of the input, after two steps."""
    torch.manual_seed(0)
    model: Any = around(make()).double().train()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    state = torch.get_rng_state()
    if cut:
        tensor_parallel(model, Comm())
        assert all(one.training for one in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        (y := model(x)).square().sum().backward()
        optimizer.step()
    assert torch.equal(state, torch.get_rng_state()), "the trial drew random numbers of the user's"
    return {**full_state_dict(model), "y": y.detach(), "dx": x.grad}


@pytest.mark.parametrize("name", CUT)
@on_each_rank("world")
def test_a_layer_that_can_be_cut_trains_as_in_one_process(name: str) -> None:
    expected, found = trained(CUT[name], cut=False), trained(CUT[name], cut=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["fused gate", "tiled groups", "down before up"])
def test_a_dry_run_refuses_the_same_layers(name: str) -> None:
    def step() -> None:
        tensor_parallel(around(REFUSED[name][0]()), Comm())

    words = "tensor_parallel cannot shard layer"
    raises(words, dry_run, step, ranks=2, step=0, error=Exception)


def test_a_dry_run_and_a_model_on_meta_are_cut() -> None:
    def step() -> None:
        model = tensor_parallel(around(rotary()()), Comm())
        model(torch.randn(2, 3, 8)).sum().backward()
        with torch.device("meta"):
            meta: Any = tensor_parallel(around(heads()()).bfloat16(), Comm())
        assert meta.layer.q.weight.shape == (8, 8)

    dry_run(step, ranks=2, step=0)


@on_each_rank("world1")
def test_with_one_rank_any_layer_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = around(mlp(fused, up=48)()), torch.randn(2, 3, 8)
    right = model(x)
    assert torch.equal(tensor_parallel(model, Comm())(x), right)
    tensor_parallel(around(without_biases()), Comm(), sequence=True)


@on_each_rank("world")
def test_a_hook_on_a_layer_that_is_replaced_is_refused() -> None:
    hooked, replaced = around(without_biases()), around(without_biases())
    hooked.layer.up.register_forward_hook(lambda *_: None)
    replaced.layer.up.forward = lambda x: 2 * x
    for model in (hooked, replaced):
        raises(("layer.up has hooks or its own forward",), tensor_parallel, model, Comm())


@pytest.mark.parametrize("has", ["tokens", "head", ""])
@on_each_rank("world")
def test_a_sequence_that_nothing_cuts_or_joins_is_refused(has: str) -> None:
    """Each rank would take all of x for its part: gradients were those of two copies of it."""
    model = around(without_biases())
    if has:
        setattr(model, has, nn.Embedding(8, 8) if has == "tokens" else nn.Linear(8, 8))
    words = "this model lacks one, so ranks would mistake all of x"
    raises((words,), tensor_parallel, model, Comm(), sequence=True)
