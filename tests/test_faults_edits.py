"""Model edits and autocast on modules as torch users write them: they compute what torch does, or
one sentence names the module and says what to do."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit import Comm, World, autocast, recompute


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, device="cpu") as two:
        yield two


LOW = torch.bfloat16
REGIONS = {"torch": partial(torch.autocast, "cpu", LOW), "labkit": autocast}

# ---- autocast: a torch.autocast inside a labkit.autocast


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


def run(
    region: Callable[..., Any], model: nn.Module, x: Tensor, around: Any = None
) -> list[Tensor]:
    """The output and all gradients; backward runs outside of the region."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    with region():
        y = around(model, x) if around else model(x)
    y.float().square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    return [g for g in found if g is not None]


def same_as_torchs(model: nn.Module, x: Tensor, around: Any = None) -> bool:
    mine, its = (run(REGIONS[name], model, x, around) for name in ("labkit", "torch"))
    assert len(mine) == len(its) > 1
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def test_rotary_angles_outside_of_autocast_are_exact_at_1500_positions() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(1, 1500, 16)
    with autocast():
        cos, _ = model.angles(x)
    assert torch.equal(cos, model.angles(x)[0])
    assert same_as_torchs(model, x)


class Switches(nn.Module):
    """Products under each kind of switch. `c` is used in one type only, and x is no leaf:
    torch's cache of casts does not tell bfloat16 from float16."""

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
    """As extensions with kernels of their own do it."""

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


class WithSquared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(super().forward(x), self.weight)


def test_custom_fwd_sees_the_region() -> None:
    torch.manual_seed(0)
    assert same_as_torchs(WithSquared(8, 8), torch.randn(4, 8))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [Attention, Switches])
def test_torchs_checkpoint_computes_again_in_the_same_types(kind: Any, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(2, 5, 16 if kind is Attention else 8)
    again = partial(checkpoint, use_reentrant=reentrant)
    assert same_as_torchs(model, x, again)
    plain, kept = run(autocast, model, x), run(autocast, model, x, again)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


@pytest.mark.parametrize("kind", [Attention, Switches])
def test_recompute_keeps_torchs_switches(kind: Any) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 5, 16 if kind is Attention else 8)
    plain, again = (run(autocast, model, x, around) for around in (None, recompute))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_what_is_inside_of_ops_in_cpp_is_cast_as_torchs_does() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(8, 8, batch_first=True)
    assert same_as_torchs(lstm, torch.randn(2, 3, 8), lambda model, x: model(x)[0])
    assert same_as_torchs(nn.Linear(8, 8), torch.randn(2, 8), lambda model, x: torch.ops.aten.mm(
        x, model.weight))  # fmt: skip


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
    with pytest.raises(ValueError, match="cannot run ops in"), autocast(torch.float32):
        pass
    assert states() == before


# ---- reductions of dtypes that torch computes for some sizes only


def reduced(dtype: torch.dtype, op: Any, numel: int) -> tuple[str, float]:
    comm = Comm()
    x = torch.ones(numel).to(dtype)
    with pytest.raises(ValueError) as caught:
        comm.all_reduce(x, op)
    comm.all_reduce(after := torch.ones(3))
    return str(caught.value), after[0].item()


@pytest.mark.parametrize(
    ("dtype", "op", "sizes"),
    [
        (torch.float8_e4m3fn, "product", (1, 2, 40)),  # on 2 ranks, 2 elements are sent one by one
        (torch.float8_e5m2, "product", (1, 0)),
        (torch.complex32, "mean", (1, 5)),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_reduction_that_torch_lacks_is_refused_before_anything_is_sent(
    world: World, dtype: torch.dtype, op: str, sizes: tuple[int, ...]
) -> None:
    for numel in sizes:
        for message, after in world.run(reduced, dtype, op, numel):
            assert f"torch knows no {op} of {dtype}; convert it first" in message
            assert after == 2.0, "the group is as good as before"
