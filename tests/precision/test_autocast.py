"""autocast beside torch's: the same casts, values and gradients, and the dispatcher's lists."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from labkit import GPT, MLP, autocast
from labkit.precision.autocasting import _open_regions, check_low_type
from labkit.precision.op_policy import CALLS_OF_MATMULS, CPU, CUDA, POLICIES, OpPolicy
from tables import cases, raises

LOW = torch.bfloat16


def alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


class WithoutTorchs(TorchFunctionMode):
    """Runs without torch's own autocast, which would make up for a cast that ours forgot."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableAutocast():
            return func(*args, **(kwargs or {}))


def some_models() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return {
        "GPT": (GPT.preset("tiny"), torch.randint(256, (2, 16))),
        "MLP": (MLP([5, 7, 3]), torch.randn(4, 5)),
        "convolution": (conv, torch.randn(2, 3, 6, 6)),
        "in Python": (attention, torch.randn(2, 5, 8)),  # F.multi_head_attention_forward
    }


def some_loss(y: Tensor) -> Tensor:
    rows = y.flatten(0, -2)
    return F.cross_entropy(rows, torch.zeros(len(rows)).long())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["GPT", "MLP", "convolution", "in Python"])
def test_a_model_computes_what_it_does_under_torchs(name: str, dtype: torch.dtype) -> None:
    ours, x = some_models()[name]
    theirs = copy.deepcopy(ours)
    with nullcontext() if name == "in Python" else WithoutTorchs(), autocast(dtype):
        result = ours(x)
    with autocast(dtype):
        our_loss = some_loss(result)
    with torch.autocast("cpu", dtype):
        torchs_loss = some_loss(torchs := theirs(x))
    assert alike(result, torchs) and alike(our_loss, torchs_loss)
    our_loss.backward(), torchs_loss.backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.grad.dtype == torch.float32 and torch.equal(p.grad, q.grad)


torch.manual_seed(0)
A, B = torch.randn(4, 4), torch.randn(4, 4)
V = torch.tensor([0.1, 0.3, 0.6, 0.9])
IMAGE = torch.randn(1, 2, 6, 6)
CLASSES = torch.tensor([0, 1, 2, 3])
GIVEN = {"A": A, "B": B, "V": V, "IMAGE": IMAGE, "CLASSES": CLASSES}


def ops_of(A: Tensor, B: Tensor, V: Tensor, IMAGE: Tensor, CLASSES: Tensor) -> dict[str, Any]:
    """Each a function of nothing."""
    einsums: dict[str, tuple[Tensor, ...]] = {
        "ij,jk->ki": (A, B), "ij->ji": (A,), "ij->i": (A,), "ii->i": (A,), "ii": (A,),
        "ij,ij->ij": (A, B), "i,j->ij": (V, V), "ij,k->i": (A, V), "ij,jk": (A, B),
        "ij, ij -> i": (A, B), "i,i": (V, V), "...j,j->...": (A, V), "ij,jk,kl->il": (A, B, A),
        "ij,jk->ik": (A.narrow(1, 0, 1), B.narrow(0, 0, 1)),  # over an index of size 1
    }  # fmt: skip
    return {f"einsum {spec}": partial(torch.einsum, spec, *x) for spec, x in einsums.items()} | {
        "matmul": lambda: A @ B,
        "rmatmul": lambda: A.__rmatmul__(B),
        "mm": lambda: torch.mm(A, B),
        "mv": lambda: torch.mv(A, V),
        "dot": lambda: torch.dot(V, V),
        "bmm": lambda: torch.bmm(A.view(1, 4, 4), B.view(1, 4, 4)),
        "addmm": lambda: torch.addmm(A, A, B),
        "baddbmm": lambda: torch.baddbmm(A.view(1, 4, 4), A.view(1, 4, 4), B.view(1, 4, 4)),
        "einsum by numbers": lambda: torch.einsum(A, [0, 1], B, [0, 1], [0, 1]),
        "linalg.matmul": lambda: torch.linalg.matmul(A, B),
        "inner": lambda: torch.inner(A, B),
        "inner of vectors": lambda: torch.inner(V, V),
        "inner with a number": lambda: torch.inner(V, V[0]),
        "pad, reflect": lambda: F.pad(A.bfloat16().view(1, 4, 4), (1, 1), mode="reflect"),
        "pad, replicate": lambda: F.pad(IMAGE.bfloat16(), (1, 1, 1, 1), mode="replicate"),
        "pad, circular": lambda: F.pad(IMAGE.bfloat16(), (1, 1, 1, 1), mode="circular"),
        "pad": lambda: F.pad(A.bfloat16(), (1, 1)),
        "pairwise_distance": lambda: F.pairwise_distance(A.bfloat16(), B.bfloat16()),
        "tensordot": lambda: torch.tensordot(A, B, dims=1),
        "linear": lambda: F.linear(A, B, V),
        "conv2d": lambda: F.conv2d(IMAGE, IMAGE.view(4, 2, 3, 3)),
        "attention": lambda: F.scaled_dot_product_attention(
            A.view(1, 1, 4, 4), A.view(1, 1, 4, 4), B.view(1, 1, 4, 4)
        ),
        "prelu": lambda: F.prelu(A, V),
        "softmax": lambda: torch.softmax(A.bfloat16(), -1),
        "softmax of fp32": lambda: A.softmax(-1),
        "log_softmax": lambda: F.log_softmax(A.bfloat16(), -1),
        "layer_norm": lambda: F.layer_norm(A.bfloat16(), (4,), V, V),
        "exp": lambda: A.bfloat16().exp(),
        "gelu": lambda: F.gelu(A.bfloat16()),
        "add": lambda: A.bfloat16() + B,
        "sum": lambda: A.bfloat16().sum(),
        "prod": lambda: A.bfloat16().prod(),
        "prod, own type": lambda: A.bfloat16().prod(dtype=torch.bfloat16),
        "norm": lambda: A.bfloat16().norm(),
        "pow": lambda: A.bfloat16() ** 2,
        "cat": lambda: torch.cat([A.bfloat16(), B]),
        "cat of low": lambda: torch.cat([A.bfloat16(), B.bfloat16()]),
        "stack": lambda: torch.stack([A, B.bfloat16()]),
        "mse_loss": lambda: F.mse_loss(A.bfloat16(), B.bfloat16()),
        "cross_entropy": lambda: F.cross_entropy(A.bfloat16(), CLASSES),
        "nll_loss": lambda: F.nll_loss(A.bfloat16(), CLASSES),
        "binary_cross_entropy": lambda: F.binary_cross_entropy(V.bfloat16(), V.bfloat16()),
        "float64": lambda: A.double() @ B.double(),
        "integers": lambda: CLASSES @ CLASSES,
        "in place": lambda: A.clone().addmm_(A, B),
        "out": lambda: torch.mm(A, B, out=torch.empty_like(A)),
        "fft": lambda: torch.fft.fft(V.bfloat16()),
        "fp16 into bf16": lambda: A.half() @ B,
    }


OPS = ops_of(**GIVEN)


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_what_it_does_under_torchs(name: str) -> None:
    with torch.autocast("cpu", LOW):
        torchs = OPS[name]()
    # These are made of ops that only torch's own autocast sees.
    inside = name.startswith(("einsum", "inner", "pad", "rmatmul", "cross_entropy", "norm"))
    with nullcontext() if inside else WithoutTorchs(), autocast(LOW):
        result = OPS[name]()
    assert alike(result, torchs), (result.dtype, torchs.dtype)


@pytest.mark.parametrize(("policy", "key"), [(CPU, "AutocastCPU"), (CUDA, "AutocastCUDA")])
def test_the_lists_are_those_of_torchs_dispatcher(policy: OpPolicy, key: str) -> None:
    registered = {
        name.removeprefix("aten::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }
    made_of_others = CALLS_OF_MATMULS | {
        "tensordot", "cross_entropy_loss", "nll_loss_nd", "linalg_norm", "pairwise_distance"
    }  # fmt: skip
    lists = [policy.low, policy.fp32, policy.promote, policy.refused]
    named = set().union(*lists)
    assert registered - named == set() == named - registered - made_of_others
    assert sum(map(len, lists)) == len(named), "an op is on one list only"


@contextmanager
def torchs_for_cuda(dtype: torch.dtype) -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


NOT_ON_CUDA = {"binary_cross_entropy", "fp16 into bf16", "fft", "inner with a number"}


@pytest.mark.slow  # fake tensors take seconds to import
@pytest.mark.parametrize("name", sorted(OPS.keys() - NOT_ON_CUDA))
def test_on_cuda_an_op_gives_the_type_that_torchs_gives(name: str) -> None:
    """With fake tensors: a CUDA device's dispatch, and no CUDA device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtypes = []
    for region in (torchs_for_cuda(LOW), autocast(LOW)):
        with FakeTensorMode() as mode:
            fakes = {key: mode.from_tensor(x) for key, x in GIVEN.items()}
            on_cuda = {key: torch.empty_like(x, device="cuda") for key, x in fakes.items()}
            op = ops_of(**on_cuda)[name]
            with region:
                dtypes.append(op().dtype)
    assert dtypes[0] == dtypes[1]


def test_on_cuda_binary_cross_entropy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the list of CUDA, put in the place of the CPU's."""
    monkeypatch.setitem(POLICIES, "cpu", CUDA)
    with autocast(LOW), pytest.raises(ValueError, match="use binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(V, V)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_the_gpt_computes_what_it_does_under_torchs(dtype: torch.dtype) -> None:
    model, x = some_models()["GPT"]
    model, x = model.cuda(), x.cuda()
    with autocast(dtype):
        mine = model(x)
    with torch.autocast("cuda", dtype):
        assert alike(mine, model(x))


def types_of_products(*regions: Any) -> list[torch.dtype]:
    found = [(A @ B).dtype]
    if regions:
        with regions[0]:
            found += types_of_products(*regions[1:])
        found.append((A @ B).dtype)
    return found


def test_the_innermost_region_decides_also_of_one_that_is_entered_again() -> None:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    ours = [autocast(bf16), autocast(enabled=False), autocast(fp16)]
    assert types_of_products(*ours) == [fp32, bf16, fp32, fp16, fp32, bf16, fp32]
    region = autocast(LOW)
    for _ in range(2):
        found = types_of_products(region, autocast(enabled=False), region)
        assert found == [fp32, LOW, fp32, LOW, fp32, LOW, fp32]


def test_an_error_inside_ends_the_region() -> None:
    with pytest.raises(ZeroDivisionError), autocast(LOW), autocast(torch.float16):
        1 / 0  # noqa: B018
    assert types_of_products(autocast(LOW)) == [torch.float32, LOW, torch.float32]


def test_tensors_of_another_device_stay_as_they_are() -> None:
    with autocast(LOW, "cpu"):
        assert (A @ B).dtype == LOW
        assert (A.to("meta") @ B.to("meta")).dtype == torch.float32
    with autocast(LOW):
        assert (A.to("meta") @ B.to("meta")).dtype == torch.float32, "meta has no policy"


@autocast(LOW)
def decorated() -> torch.dtype:
    return (A @ B).dtype


def test_a_function_can_be_a_region() -> None:
    assert [decorated(), decorated(), (A @ B).dtype] == [LOW, LOW, torch.float32]


def casts(function: Callable[[], Any]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    return sum(event.name == "aten::_to_copy" for event in seen.events())


def test_a_weight_is_cast_once_in_a_region_and_anew_in_the_next() -> None:
    w, x = nn.Parameter(A.clone()), B.to(LOW)

    def uses() -> None:
        with autocast(LOW):
            x @ w
            with autocast(LOW):
                x @ w
            x @ w

    assert casts(uses) == 1
    assert casts(lambda: (uses(), uses())) == 2  # the optimizer may have stepped in between


def test_every_use_of_a_cast_weight_adds_to_its_gradient() -> None:
    w = nn.Parameter(A.clone())
    with autocast(LOW):
        ((B @ w).float().sum() + (B @ w).float().sum()).backward()
    twice, w.grad = w.grad, None
    with autocast(LOW):
        (B @ w).float().sum().backward()
    assert torch.equal(twice, 2 * w.grad)


def test_a_weight_first_used_without_gradient_gets_one_afterwards() -> None:
    """torch's cache gives the copy without history again: its gradient would be None."""
    w = nn.Parameter(A.clone())
    with autocast(LOW):
        with torch.no_grad():
            B @ w
        (B @ w).float().sum().backward()
    assert w.grad is not None


def test_two_threads_may_call_a_decorated_function() -> None:
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    @autocast(LOW)
    def inside(entered: threading.Event, go_on: threading.Event) -> None:
        entered.set()
        assert go_on.wait(10)

    thread = threading.Thread(
        target=lambda: (first_in.wait(10), inside(second_in, first_out)), daemon=True
    )
    thread.start()
    with autocast(torch.float16):
        inside(first_in, second_in)
        assert (A @ B).dtype == torch.float16, "the region around it is on again"
    first_out.set()
    thread.join(10)


def test_in_a_long_region_a_weight_is_cast_anew_after_writes_and_has_one_copy() -> None:
    """As where the region is around the training loop: steps write to the weights."""
    w, products = nn.Parameter(A.clone()), []
    with autocast(LOW):
        for _ in range(3):
            products.append(B @ w)
            with torch.no_grad():
                w.mul_(2)
        (region,) = _open_regions()
        assert len(region.casts) == 1
    assert products[0].any()
    assert torch.equal(products[1], 2 * products[0]) and torch.equal(products[2], 4 * products[0])


@pytest.mark.parametrize("given", [("cpu", LOW), ("cuda",)])
def test_torchs_argument_order_is_reported(given: tuple[Any, ...]) -> None:
    raises(rf"first, as autocast\(torch.bfloat16, '{given[0]}'\)", autocast, *given)


@cases(
    (torch.float8_e4m3fn, None, "use_fp8"),
    (torch.float32, None, "use torch.bfloat16"),
    (torch.int8, None, "use torch.bfloat16"),
    (torch.bfloat16, "mps", "no op policy for 'mps'; choose one of cpu, cuda"),
)
def test_a_type_or_device_that_cannot_be_is_refused(
    dtype: torch.dtype, device: str | None, says: str
) -> None:
    raises(says, autocast(dtype, device).__enter__)
    with autocast(dtype, device, enabled=False):
        pass


def test_a_cpu_without_products_in_fp16_says_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any) -> None:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(Tensor, "__matmul__", lacks)
    words = "no matmul in torch.float16 on this CPU; use torch.bfloat16"
    raises(words, check_low_type, torch.float16, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    raises("this machine has no CUDA device", autocast(LOW, "cuda").__enter__)
