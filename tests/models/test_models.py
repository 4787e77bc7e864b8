"""The models: right numbers, named parts that can be edited, and every mode a strategy needs."""

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parameters_to_vector

from labkit.models import GPT, MLP, PlainAttention
from labkit.models.attention import CausalAttention, Dropout
from small_models import difference
from tables import raises, refusals


def tokens_of(model: GPT, rows: int = 3, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.vocab, (rows, length), generator=generator)


def small(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT.preset("tiny", vocab=19, **changes).double()


@pytest.mark.parametrize("kv_heads", [None, 1, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("vocab", "width", "depth", "context"), [(11, 12, 1, 5), (7, 20, 3, 4)])
def test_parameter_count_is_the_formula_of_its_docstring(
    vocab: int, width: int, depth: int, context: int, tied: bool, kv_heads: int | None
) -> None:
    model = GPT(vocab, width, depth, 4, context, kv_heads=kv_heads, tied=tied)
    c = width * (kv_heads or 4) // 4
    attn = 2 * (width**2 + width) + 2 * (width * c + c)
    block = 4 * width + attn + 8 * width**2 + 5 * width
    assert kv_heads or block == 12 * width**2 + 13 * width
    head = 0 if tied else vocab * width
    expected = (vocab + context) * width + depth * block + 2 * width + head
    assert model.parameter_count == expected == len(parameters_to_vector(model.parameters()))


def test_presets_have_the_size_of_their_name_and_arguments_can_be_replaced() -> None:
    for name, count in {"tiny": 7056, "1M": 987096, "3.4M": 3438080}.items():
        assert GPT.preset(name).parameter_count == count
    model = GPT.preset("1M", vocab=256, kv_heads=3, depth=1)
    assert (model.vocab, model.kv_heads, len(model.blocks)) == (256, 3, 1)
    assert model(tokens_of(model)).shape == (3, 7, 256)
    raises(r"'7B'.*tiny, 1M, 3\.4M", GPT.preset, "7B")


def test_gpt3_is_counted_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT(50257, 12288, 96, 96, 2048)
    assert 174e9 < model.parameter_count < 176e9


test_sizes_that_do_not_fit_are_refused = refusals(
    lambda changes: GPT.preset("tiny", **changes),
    ({"heads": 5}, "width 12 is not divisible by 5 heads"),
    ({"kv_heads": 3}, "4 query heads are not divisible by 3 key-value heads"),
    ({"kv_heads": 0}, "kv_heads=0"),
    ({"depth": 0}, "depth=0"),
    ({"vocab": -1}, "vocab=-1"),
    ({"dropout": 1.0}, "dropout"),
)


def test_sequence_longer_than_context_is_refused() -> None:
    model = small()
    assert model(tokens_of(model, length=16)).shape == (3, 16, 19)
    raises("17 tokens is longer than the model's context of 16", model, tokens_of(model, length=17))
    raises(r"\[rows, length\], not \[7\]", model, tokens_of(model)[0])


def by_hand(model: GPT, tokens: Tensor) -> Tensor:
    """The same model from its weights, attention written out with loops over the heads."""
    s = tokens.shape[1]
    x = model.embed.tokens.weight[tokens] + model.embed.positions.weight[:s]
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
    for block in model.blocks:
        attn, e = block.attn, block.attn.head_width
        z = block.norm1(x)
        q, k, v = attn.q(z), attn.k(z), attn.v(z)
        heads = []
        for h in range(model.heads):
            g = h * model.kv_heads // model.heads  # the key-value head that h shares
            mine, shared = slice(h * e, (h + 1) * e), slice(g * e, (g + 1) * e)
            scores = q[..., mine] @ k[..., shared].transpose(1, 2) / e**0.5
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[..., shared])
        x = x + attn.out(torch.cat(heads, -1))
        x = x + block.mlp.down(F.gelu(block.mlp.up(block.norm2(x))))
    return model.norm(x) @ model.head.weight.T


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_forward_equals_the_model_written_out(kv_heads: int) -> None:
    model = small(kv_heads=kv_heads)
    with torch.no_grad():  # weights of size 1, so that nothing hides in small numbers
        for weight in model.parameters():
            weight.normal_()
    tokens = tokens_of(model)
    torch.testing.assert_close(model(tokens), by_hand(model, tokens), rtol=0, atol=1e-10)


def test_positions_say_where_columns_stand() -> None:
    model = small()
    tokens = tokens_of(model)
    assert torch.equal(model(tokens), model(tokens, torch.arange(7)))
    assert not torch.allclose(model(tokens), model(tokens, torch.arange(5, 12)))


def test_tied_gradient_is_the_sum_of_both_uses() -> None:
    tied, untied = small(), small(tied=False)
    untied.load_state_dict(tied.state_dict())  # two parameters, the same numbers
    assert tied.head.weight is tied.embed.tokens.weight
    for model in (tied, untied):
        model(tokens_of(model)).logsumexp(-1).sum().backward()
    both = untied.embed.tokens.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embed.tokens.weight.grad, both, rtol=0, atol=1e-12)
    names = [name for name, _ in tied.named_parameters()]
    assert "head.weight" not in names  # counted, sent and stepped once


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_stay_tied(copied: Callable[[GPT], GPT]) -> None:
    model = copied(small())
    assert model.head.weight is model.embed.tokens.weight


def test_weights_start_as_in_gpt2() -> None:
    torch.manual_seed(0)
    model = GPT(500, 120, 8, 4, 32)
    block = model.blocks[3]
    for weight, std in [
        (model.embed.tokens.weight, 0.02),
        (block.attn.q.weight, 0.02),
        (block.mlp.up.weight, 0.02),
        (block.attn.out.weight, 0.005),  # 0.02 / sqrt(2 * 8)
        (block.mlp.down.weight, 0.005),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert block.attn.k.bias.eq(0).all() and block.norm2.bias.eq(0).all()
    assert block.norm1.weight.eq(1).all()
    tokens = tokens_of(model, rows=32)  # a tied head leans to its own input: ask for another's
    start = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 0).flatten())
    assert start.item() == pytest.approx(torch.tensor(500.0).log().item(), abs=0.2)


def test_same_seed_same_weights_and_dropout_acts_in_training_only() -> None:
    first, model = small(), small(dropout=0.3)
    assert difference(model.state_dict(), first.state_dict()) == 0
    tokens = tokens_of(model)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_written_out_equals_the_kernel(kv_heads: int) -> None:
    q = torch.randn(2, 4, 7, 3, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 7, 3, dtype=torch.float64)
    plain, kernel = PlainAttention()(q, k, v), CausalAttention(0.0)(q, k, v)
    torch.testing.assert_close(plain, kernel, rtol=0, atol=1e-12)


def test_attention_written_out_drops_weights_in_training_only_and_keeps_the_type() -> None:
    qkv = torch.randn(3, 2, 4, 7, 3)
    core = PlainAttention(0.5)
    assert not torch.equal(core(*qkv), core(*qkv))
    assert core(*qkv.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(core.eval()(*qkv), CausalAttention(0.0)(*qkv))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_that_of_torch_with_a_mask_of_one_byte(dtype: torch.dtype) -> None:
    kept = list[Tensor]()
    x = torch.ones(400, 50, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = Dropout(0.2)(x)
    y.sum().backward()
    assert sum(t.nbytes for t in kept) == x.numel()
    assert set(y.unique().tolist()) == {0, torch.tensor(1.25, dtype=dtype).item()}
    assert y.eq(0).float().mean().item() == pytest.approx(0.2, abs=0.02)
    assert torch.equal(x.grad, y.detach()), "what is dropped has no gradient"
    assert Dropout(0.0)(x) is Dropout(0.3).eval()(x) is x


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_rows_give_zero_gradients(dtype: torch.dtype, kv_heads: int) -> None:
    """A rank without rows in the last batch still has a gradient to send: zero."""
    model = small(kv_heads=kv_heads, dropout=0.1).to(dtype)
    logits = model(tokens_of(model)[:0])
    assert logits.shape == (0, 7, 19) and logits.dtype == dtype
    logits.sum().backward()
    assert all(weight.grad.eq(0).all() for weight in model.parameters())


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_bfloat16_is_near_float64(kv_heads: int) -> None:
    model = small(kv_heads=kv_heads)
    exact, rounded = model(tokens_of(model)), model.bfloat16()(tokens_of(model))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), exact, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_runs_on_shapes_alone(kv_heads: int) -> None:
    """On the meta device and under fake tensors: how a model too large to hold is recorded."""
    with torch.device("meta"):
        model = GPT.preset("tiny", kv_heads=kv_heads)
        logits = model(torch.zeros(5, 9, dtype=torch.long))
    logits.sum().backward()
    assert logits.is_meta and logits.shape == (5, 9, 256)

    with FakeTensorMode():
        model = GPT.preset("tiny", kv_heads=kv_heads, dropout=0.1)
        model.blocks[0].attn.core = PlainAttention(0.1)
        for rows in (5, 0):
            logits = model(torch.zeros(rows, 9, dtype=torch.long))
            logits.sum().backward()
            assert logits.shape == (rows, 9, 256)
        assert all(weight.grad.shape == weight.shape for weight in model.parameters())


def test_meta_model_becomes_the_real_one() -> None:
    real = GPT.preset("tiny")
    with torch.device("meta"):
        late = GPT.preset("tiny")
    late.to_empty(device="cpu")
    for model in (real, late):
        torch.manual_seed(0)
        model.reset_parameters()
    assert late.head.weight is late.embed.tokens.weight
    assert difference(late.state_dict(), real.state_dict()) == 0


def test_parts_have_their_names_and_no_buffers() -> None:
    model = small(kv_heads=2)
    assert [name for name, _ in model.named_children()] == ["embed", "blocks", "norm", "head"]
    block = model.blocks[0]
    linear = {name for name, part in block.named_modules() if isinstance(part, nn.Linear)}
    assert linear == {"attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down"}
    assert all(block.get_submodule(name).bias is not None for name in linear)
    assert block.attn.k.weight.shape == (6, 12) and block.attn.q.weight.shape == (12, 12)
    assert model.head.bias is None
    assert not list(model.buffers())


@pytest.mark.parametrize("sizes", [[3, 5], [7, 13, 1], [5, 3, 11, 2]])
def test_mlp_of_odd_sizes(sizes: list[int]) -> None:
    model = MLP(sizes)
    x = torch.randn(4, sizes[0])
    y = x
    for i, layer in enumerate(model.layers):
        y = layer(F.gelu(y) if i else y)
    assert torch.equal(model(x), y) and y.shape == (4, sizes[-1])
    assert len(parameters_to_vector(model.parameters())) == sum(
        n * m + m for n, m in itertools.pairwise(sizes)
    )
    model(x[:0]).sum().backward()
    assert all(weight.grad.eq(0).all() for weight in model.parameters())


@pytest.mark.parametrize("activation", [torch.tanh, nn.Tanh()])
def test_mlp_takes_a_function_or_a_module(activation: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = MLP([3, 4, 2], activation)
    x = torch.randn(5, 3)
    assert torch.equal(model(x), model.layers[1](model.layers[0](x).tanh()))


@pytest.mark.parametrize("sizes", [[], [3], [3, 0, 2]])
def test_mlp_without_a_layer_is_refused(sizes: list[int]) -> None:
    raises("at least two sizes", MLP, sizes)
