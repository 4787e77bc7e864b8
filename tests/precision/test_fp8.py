"""8-bit products: errors within the formats' steps, scales that fit, and learning as in bf16."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit import GPT, MLP, Fp8Linear, Text, autocast, loss, use_fp8
from labkit.memory.edits import recompute
from labkit.precision import fp8
from labkit.precision.fp8 import E4M3, E5M2, Fp8Cast, check_has_fp8, fp8_matmul
from tables import raises
from test_autocast import alike

HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # of a number's size, at most
TOLERANCE = 0.02  # in loss, nats, of a tiny GPT in 8 bits against bf16


@pytest.mark.parametrize("dtype", HALF_STEP)
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e5])
def test_a_scaled_cast_is_within_half_a_step_whatever_the_size(dtype: Any, size: float) -> None:
    x = torch.linspace(0.1, 1, 1000) * size
    x8, scale = Fp8Cast(dtype)(x)
    assert x8.dtype == dtype and torch.frexp(scale).mantissa == 0.5, "a power of two"
    error = (x8.float() / scale - x).abs() / x
    assert error.max() <= HALF_STEP[dtype]
    most = torch.finfo(dtype).max
    assert most / 2 < x.max() * scale <= most, "as large as it goes"


def test_zeros_are_cast_as_they_are_and_amax_is_of_magnitudes() -> None:
    for x in (torch.zeros(3), torch.zeros(0, 3)):
        x8, scale = Fp8Cast(E4M3)(x)
        assert scale == 1 and torch.equal(x8.float(), x)
    x8, scale = Fp8Cast(E4M3)(torch.tensor([-96.0, 1.0]))
    assert scale == 4 and x8.float().tolist() == [-384.0, 4.0]


@pytest.mark.parametrize("history", [0, 2])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_has_overflowed_is_not_hidden(history: int, bad: float) -> None:
    """The clamp would make a finite number of inf, and a loss scaler would step on it."""
    cast = Fp8Cast(E5M2, history)
    cast(torch.ones(3))
    x8, _ = cast(torch.tensor([1.0, bad]))
    assert not x8.float().isfinite().all()
    x8, scale = cast(torch.ones(3))
    assert x8.float().isfinite().all() and scale > 1, "and it does not stay in the history"


def test_a_delayed_scale_is_that_of_the_largest_of_the_last_calls() -> None:
    cast, fits = Fp8Cast(E4M3, history=2), Fp8Cast(E4M3)
    calls = [torch.tensor([amax]) for amax in (1.0, 8.0, 2.0, 2.0, 2.0)]
    delayed, fitting = ([scaled(x)[1].item() for x in calls] for scaled in (cast, fits))
    assert delayed == [fitting[k] for k in (0, 0, 1, 1, 2)]  # the first: as it fits


@pytest.mark.parametrize("dtype", HALF_STEP)
def test_what_a_delayed_scale_is_too_large_for_becomes_the_largest_number(dtype: Any) -> None:
    cast, most = Fp8Cast(dtype, history=2), torch.finfo(dtype).max
    cast(torch.tensor([1.0]))
    x8, _ = cast(torch.tensor([100.0, -100.0]))
    assert x8.float().tolist() == [most, -most]


@pytest.mark.parametrize("dtype", HALF_STEP)
def test_tiny_values_are_scaled_by_the_largest_finite_scale(dtype: torch.dtype) -> None:
    tiny = torch.tensor([2.0**-125])
    x8, scale = Fp8Cast(dtype)(tiny)
    assert scale == 2.0**126 and 1 / scale > 0, "beyond, it would be inf"
    assert x8.float() / scale == tiny


def test_a_model_cast_to_16_bits_keeps_its_history_in_fp32() -> None:
    layer = Fp8Linear(nn.Linear(2, 2), history=2)
    layer.cast_g(torch.tensor([1e6]))  # fp16 ends at 65504
    layer.half()
    assert layer.weight.dtype == torch.float16
    assert layer.cast_g.amaxes.tolist() == [1e6, 0.0]
    assert layer.to("meta").cast_g.amaxes.is_meta


def test_evaluation_leaves_the_history_as_it_is() -> None:
    cast = Fp8Cast(E4M3, history=2).eval()
    cast(torch.tensor([3.0]))
    assert cast.amaxes.tolist() == [0.0, 0.0]


def pair(k: int, n: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    linear = nn.Linear(k, n).to(dtype)
    return linear, Fp8Linear(copy.deepcopy(linear), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_within_the_steps_of_the_formats(dtype: torch.dtype) -> None:
    linear, ours = pair(24, 7, dtype)
    x, g, results = torch.randn(2, 5, 24).to(dtype), torch.randn(2, 5, 7).to(dtype), []
    for layer in (linear, ours):
        given = x.clone().requires_grad_()
        y = layer(given)
        y.backward(g)
        results.append([y, given.grad, layer.weight.grad, layer.bias.grad])
    w, rows, gs = linear.weight.float(), x.flatten(0, 1).float(), g.flatten(0, 1).float()
    sizes = [rows.abs() @ w.abs().T, gs.abs() @ w.abs(), gs.abs().T @ rows.abs()]
    roundings = [2 * HALF_STEP[E4M3], sum(HALF_STEP.values()), sum(HALF_STEP.values())]
    for right, mine, size, rounding in zip(*results, sizes, roundings):
        assert mine.dtype == right.dtype and mine.shape == right.shape
        error = (mine - right).abs().float().reshape(size.shape)
        assert (error <= 1.2 * rounding * size + 0.02 * size.mean()).all()
        assert error.max() > 0.001 * size.mean(), "it is rounded to 8 bits"
    assert torch.equal(results[0][3], results[1][3]), "the bias is not rounded"


def test_gradients_have_the_range_of_e5m2_and_activations_the_digits_of_e4m3() -> None:
    """Beside 1, e4m3 has nothing as small as 2⁻²⁰."""
    _, ours = pair(1, 1)
    x = torch.zeros(2, 1, requires_grad=True)
    ours(x).backward(torch.tensor([[1.0], [2.0**-20]]))
    assert x.grad is not None and x.grad[1] / x.grad[0] == 2.0**-20
    # 1.125 is a number of e4m3, and lies in the middle of two of e5m2.
    layer = Fp8Linear(nn.Linear(1, 1, bias=False))
    for x, w in ((1.125, 1.0), (1.0, 1.125)):
        nn.init.constant_(layer.weight, w)
        assert layer(torch.tensor([[x]])).item() == 1.125


def test_x_and_w_are_kept_for_backward_in_1_byte_each() -> None:
    _, ours = pair(24, 7)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(torch.randn(5, 24, requires_grad=True))
    assert sum(t.nbytes for t in kept if t.numel() > 1) == 5 * 24 + 7 * 24


def test_within_autocast_products_stay_in_8_bits_and_come_out_in_16() -> None:
    _, ours = pair(24, 7)
    ours.bias = None
    x = torch.randn(5, 24)
    right = ours(x)
    for region in (autocast(), torch.autocast("cpu", torch.bfloat16)):
        with region:
            assert alike(ours(x), right.bfloat16()), "of the type that a linear gives there"
            assert ours(x.double()).dtype == torch.float64, "which none casts"
            with autocast(enabled=False), torch.autocast("cpu", enabled=False):
                assert alike(ours(x), right)


def layer_gradient(history: int, again: Callable[..., Any] | None) -> Tensor | None:
    _, layer = pair(16, 16, history=history)
    layer(torch.randn(4, 16))
    x = (20 * torch.randn(4, 16)).requires_grad_()
    y = again(layer, x) if again else layer(x)
    y.square().sum().backward()
    return layer.weight.grad


@pytest.mark.parametrize("again", [recompute, partial(checkpoint, use_reentrant=False)])
def test_delayed_scaling_is_refused_where_forward_runs_again(again: Callable[..., Any]) -> None:
    """It would be scaled by the calls since, and gradients were those of another forward."""
    right, found = layer_gradient(0, None), layer_gradient(0, again)
    assert right is not None and found is not None and torch.equal(right, found)
    raises(r"recomputes this layer's forward", layer_gradient, 1, again)


def test_only_the_gradients_that_are_wanted_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    matmul = fp8.fp8_matmul
    monkeypatch.setattr(fp8, "fp8_matmul", lambda *given: (made.append(1), matmul(*given))[1])
    _, layer = pair(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    assert len(made) == 2, "forward and dw: nobody wants dx"
    layer.weight.requires_grad_(False)
    layer(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert len(made) == 4, "forward and dx"


def test_a_second_derivative_is_refused() -> None:
    _, layer = pair(3, 3)
    x = torch.ones(1, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    raises("once_differentiable", dx.sum().backward, error=RuntimeError)


@pytest.mark.parametrize("shape", [(16, 32, 48), (3, 5, 7)])
def test_the_simulated_product_is_torchs_own(shape: tuple[int, int, int]) -> None:
    """`torch._scaled_mm` has a slow form for CPUs, the same sum of the same products."""
    m, k, n = shape
    (a, s), (b, t) = Fp8Cast(E5M2)(torch.randn(m, k)), Fp8Cast(E4M3)(torch.randn(k, n))
    simulated, torchs = (
        fp8_matmul(a, b, s * t, torch.float32, simulate=simulate) for simulate in (True, False)
    )
    assert torch.allclose(simulated, torchs, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < fp8.CAPABILITY,
    reason="needs products of 8 bits",
)
def test_a_gpus_products_are_the_simulated_ones() -> None:
    torch.manual_seed(0)
    real = Fp8Linear(nn.Linear(40, 24, device="cuda"))
    simulated = Fp8Linear(nn.Linear(40, 24, device="cuda"), simulate=True)
    simulated.load_state_dict(real.state_dict())
    x = torch.randn(10, 40, device="cuda")
    results = []
    for layer in (real, simulated):
        given = x.clone().requires_grad_()
        layer(given).square().sum().backward()
        results.append([given.grad, layer.weight.grad])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))


def mean_loss(history: int | None) -> float:
    """Of the last 20 of 60 steps; in 8 bits where there is a history, otherwise in bf16."""
    torch.manual_seed(0)
    model, text, losses = GPT.preset("tiny"), Text(), []
    if history is not None:
        use_fp8(model, only="blocks.*", history=history)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        batch = text.batch(step, rows=16, length=16)
        with autocast(torch.bfloat16):
            value = loss(model(batch.x), batch)
        adam.zero_grad()
        value.backward()
        adam.step()
        losses.append(value.item())
    return sum(losses[-20:]) / 20


@pytest.mark.slow
def test_a_gpt_learns_in_8_bits_what_it_learns_in_bf16() -> None:
    bf16 = mean_loss(None)
    assert bf16 < 4.0, "it has learned something: 5.5 is to know nothing"
    for history in (0, 4):
        assert abs(mean_loss(history) - bf16) < TOLERANCE


def test_only_the_layers_that_were_named_are_replaced_and_parameters_stay() -> None:
    model = GPT.preset("tiny")
    before, state = dict(model.named_parameters()), model.state_dict().keys()
    names = use_fp8(model, only="*.mlp.*")
    assert names == [f"blocks.{i}.mlp.{part}" for i in (0, 1) for part in ("up", "down")]
    assert all(isinstance(model.get_submodule(name), Fp8Linear) for name in names)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert model.state_dict().keys() == state, "checkpoints stay as they are"
    assert "simulated" in repr(model.blocks[0].mlp.up)


def test_a_layer_with_two_names_stays_one() -> None:
    model = nn.ModuleDict({"one": nn.Linear(3, 3)})
    model["other"] = model["one"]
    model.eval()
    assert use_fp8(model) == ["one", "other"]
    assert isinstance(model["one"], Fp8Linear) and model["one"] is model["other"]
    assert not model["one"].training and not model["one"].cast_x.training


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match=r"no nn.Linear of MLP matches 'blocks.\*'; choose one of"):
        use_fp8(MLP([3, 3]), only="blocks.*")
    with pytest.raises(ValueError, match="on CUDA devices only, not on cpu; use simulate=True"):
        Fp8Linear(nn.Linear(3, 3), simulate=False)
    model = MLP([3, 3, 3])
    linear = next(part for part in model.modules() if isinstance(part, nn.Linear))
    linear.register_forward_hook(lambda *_: None)
    raises("has hooks, which an Fp8Linear would not", use_fp8, model)


def test_a_gpu_without_8_bits_says_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"A100 has compute capability 8.0, .* need 8.9; use bf"):
        check_has_fp8(torch.device("cuda"), simulate=False)
    check_has_fp8(torch.device("cuda"), simulate=True)
