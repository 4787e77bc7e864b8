"""Models other than labkit.GPT under tensor and context parallelism: right, or refused."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import labkit
from labkit import GPT, Comm, RankError, World, listen, tensor_parallel
from labkit.parallel.common.shards import shard_of
from labkit.parallel.tensor import validation as tensor_checks
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.recipes import held_bytes
from small_models import Custom, difference
from tables import raises
from test_faults_copies import saved
from worlds import on_each_rank


def mlp() -> Any:
    """As GPT-2's: dropout stands behind `down`, where every rank has the whole sum."""
    parts = {"up": nn.Linear(8, 32), "down": nn.Linear(32, 8), "drop": nn.Dropout(0.5)}
    return Custom(lambda m, x: m.drop(m.down(m.drop(F.gelu(m.up(x))))), **parts)


@on_each_rank("world4")
def test_dropout_behind_the_rows_is_the_same_on_all_ranks() -> None:
    torch.manual_seed(0)
    layer, inside = mlp(), []
    model = tensor_parallel(nn.Sequential(layer), Comm())
    layer.down.register_forward_pre_hook(lambda _, args: inside.append(args[0] != 0))
    same = model(torch.ones(3, 5, 8)).tolist(), torch.rand(2).tolist()
    ranks = Comm().all_gather_object((same, inside[0].tolist()))
    assert all(outputs == same for outputs, _ in ranks)
    assert all(masks != ranks[0][1] for _, masks in ranks[1:])


@on_each_rank("world2")
def test_an_error_in_a_layer_leaves_the_random_numbers_as_the_others_have_them() -> None:
    torch.manual_seed(0)
    layer = mlp()
    model = tensor_parallel(nn.Sequential(layer), Comm())
    layer.drop.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
    raises("", model, torch.ones(3, 5, 8), error=KeyError)
    one, other = Comm().all_gather_object(torch.rand(3).tolist())
    assert one == other


@on_each_rank("world2")
def test_parameters_that_would_not_stay_one_or_whole_are_refused() -> None:
    inside, tied = GPT.preset("tiny"), GPT.preset("tiny")
    attention: Any = inside.blocks[0].attn
    parts = {"core": attention.core, "norm": nn.LayerNorm(3)}
    attention.core = Custom(lambda m, q, k, v: m.core(m.norm(q), m.norm(k), v), **parts)
    first, second = (block.mlp.up for block in tied.blocks)
    second.weight = first.weight
    for model, words in (
        (inside, "blocks.0.attn.core.norm.weight is a parameter"),
        (tied, "are tied and would be sharded separately"),
    ):
        raises((words,), tensor_parallel, model, Comm())


@on_each_rank("world2")
def test_tied_parameters_stay_tied_inside_another_module() -> None:
    tokens, grads = torch.arange(32).view(2, 16), []
    for cut in (False, True):
        torch.manual_seed(0)
        model = Custom(lambda m, tokens: m.gpt(tokens), gpt=GPT.preset("tiny").double())
        if cut:
            tensor_parallel(model, Comm())
            assert model.gpt.head.weight is model.gpt.embed.tokens.weight
        model(tokens).square().mean().backward()
        grads.append(model.gpt.embed.tokens.weight.grad)
    whole, part = grads
    assert torch.allclose(whole.chunk(2)[Comm().rank], part, rtol=0, atol=1e-12)


@on_each_rank("world2")
def test_reading_one_projection_changes_nothing() -> None:
    """q, k and v are computed together, when the first is asked for."""
    torch.manual_seed(0)
    attention: Any = tensor_parallel(GPT.preset("tiny").double(), Comm()).blocks[0].attn
    x = torch.randn(2, 16, 12, dtype=torch.float64)
    with torch.no_grad():
        attention.k(x)
    attention(x).square().sum().backward()
    has_gradient = attention.q.weight.grad is not None
    attention.k(x)
    with torch.no_grad():
        attention.q.weight.mul_(2)
    assert has_gradient and torch.equal(attention(x), attention(x.clone()))


class WithTargets(GPT):
    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        return F.cross_entropy(super().forward(tokens, positions).flatten(0, 1), targets.flatten())


@on_each_rank("world2")
def test_positions_are_filled_in_wherever_they_stand() -> None:
    tokens, comm = torch.arange(32).view(2, 16), Comm()

    def fresh() -> Any:
        torch.manual_seed(0)
        return WithTargets.preset("tiny").double()

    model, shard = labkit.context_parallel(fresh(), comm), labkit.sequence_shard(tokens, comm)
    value = model(shard, shard).detach()
    comm.all_reduce(value, "mean")
    assert value.item() == pytest.approx(fresh()(tokens, tokens).item(), abs=1e-12)


def gated(width: int = 8, hidden: int = 24, gate: int | None = None) -> nn.Module:
    ends = {"up": nn.Linear(width, hidden, bias=False), "down": nn.Linear(hidden, width)}
    gates = nn.Linear(width, gate or hidden)
    return Custom(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), gate=gates, **ends)


def gated_gpt() -> Any:
    torch.manual_seed(0)
    model: Any = GPT(31, 24, 2, 6, 16)
    for block in model.blocks:
        block.mlp = gated(24, 36)
    return model.double()


@pytest.mark.parametrize("size", [2, 3])
def test_a_gated_mlp_is_cut_by_columns_and_rows(world2: World, world3: World, size: int) -> None:
    """Weights as of one process; up and gate get one x: a layer still sends four all-reduces."""

    def run(sequence: bool) -> None:
        comm, alone = Comm(), gated_gpt()
        model = tensor_parallel(gated_gpt(), comm, sequence=sequence, gather_logits=False)
        tokens = torch.arange(30).view(2, 15)[:, :12]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, model)]
        for _ in range(2):
            with listen() as events:
                logits = model(tokens)
                vocab_parallel_cross_entropy(logits, tokens, comm, vocab=31).backward()
            F.cross_entropy(alone(tokens).flatten(0, 1), tokens.flatten()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert difference(labkit.full_state_dict(model), alone.state_dict()) < 1e-10
        assert model.blocks[0].mlp.gate.weight.shape == (36 // size, 24)
        summed = [e for e in events if (e.op, e.payload_bytes) == ("all_reduce", 2 * 12 * 24 * 8)]
        message = "four a layer, and of the embedding and the head's input"
        assert sequence or len(summed) == 2 * 4 + 2, message

    for sequence in (False, True):
        (world2 if size == 2 else world3).run(run, sequence)


@on_each_rank("world2")
def test_the_predicted_bytes_of_a_gated_model_are_what_is_held() -> None:
    plain, comm = gated_gpt(), Comm()
    predicted = sum(held_bytes(plain, comm.size).values())
    assert predicted == sum(p.nbytes for p in tensor_parallel(plain, comm).parameters())


@on_each_rank("world2")
def test_an_invalid_gate_is_refused_by_name() -> None:
    for options, words in (
        ({"gate": 1}, r"0\.gate has 1 features, but up has 24.*rename the gate"),
        ({"hidden": 9}, r"9 hidden features of 0 are not divisible by 2"),
    ):
        raises(words, tensor_parallel, nn.Sequential(gated(**options)), Comm())


@on_each_rank("world2")
def test_a_refused_layer_stays_whole() -> None:
    """Its trial is put off to the first input; v, which does not divide, is the third to be cut."""
    parts = {name: nn.Linear(8, 5 if name == "v" else 8) for name in ("q", "k", "v", "out")}
    layer = Custom(lambda m, x, mask: m.out(m.q(x) * m.k(x) + m.v(x)), head_width=4, **parts)
    raises("has size 5", tensor_parallel, nn.Sequential(layer), Comm())
    assert all(getattr(layer, name) is part for name, part in parts.items())
    assert "forward" not in vars(layer)


def test_an_input_inside_a_container_is_compared(world2: World) -> None:
    def run(where: str) -> None:
        layer = Custom(lambda m, batch, *, more=None: m.mlp(batch["x"][0]), mlp=gated())
        model = tensor_parallel(layer, Comm())
        same, other = torch.ones(2, 3, 8), torch.full((2, 3, 8), float(Comm().rank))
        batch = {"x": [other if where == "in a list" else same]}
        model(batch, more=(other,) if where == "by name" else None)

    for where in ("in a list", "by name"):
        raises("the input differs between the ranks", world2.run, run, where, error=RankError)
    world2.run(run, "nowhere")


def test_targets_that_differ_are_found(world2: World) -> None:
    def run() -> None:
        vocab_parallel_cross_entropy(torch.ones(2, 3), torch.tensor([0, Comm().rank]), Comm())

    raises("the tensor of targets differs(.|\n)*the same batch", world2.run, run, error=RankError)


def test_random_states_of_the_models_device_are_compared(world2: World) -> None:
    def run(device: str) -> None:
        state = torch.tensor([Comm().rank])
        other = SimpleNamespace(device=torch.device(device), get_state=lambda: state)
        here = [torch.default_generator, other]
        with patch.object(tensor_checks, "generators", lambda: here):
            tensor_checks.check_same_input(Comm(), False, mlp().to("meta"), (), {})

    raises("the random state differs(.|\n)*the same seed", world2.run, run, "meta", error=RankError)
    world2.run(run, "cuda:1")


def test_a_model_that_was_pickled_says_that_its_ranks_are_gone(world2: World) -> None:
    def run(way: str) -> Any:
        torch.manual_seed(0)
        model = GPT(31, 24, 1, 4, 16)
        if way == "tensor":
            return tensor_parallel(model, Comm())
        return labkit.context_parallel(model, Comm(), way=way)

    tokens = torch.zeros(1, 8, dtype=torch.long)
    for way in ("tensor", "ring", "ulysses"):
        models = world2.run(run, way)
        for model in (models[1], saved(models[1])):
            raises(r"rank 1 over ranks \[0, 1\] was pickled", model, tokens, error=RuntimeError)
            assert any(shard_of(p) for p in model.parameters()) == (way == "tensor")
            if way == "tensor":
                assert str(shard_of(model.blocks[0].attn.q.weight)) == "12:24 of 24 along dim 0"


def test_a_model_of_one_rank_computes_wherever_it_goes() -> None:
    def run() -> Any:
        torch.manual_seed(0)
        return tensor_parallel(GPT(31, 24, 1, 4, 16, dropout=0.1), Comm())

    torch.manual_seed(0)
    plain, tokens = GPT(31, 24, 1, 4, 16, dropout=0.1).eval(), torch.arange(8).view(1, 8)
    with World(1) as world:
        (model,) = world.run(run)
    assert torch.equal(model.eval()(tokens), plain(tokens))
    model.train()(tokens).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_dropout_draws_whatever_the_type_of_its_p() -> None:
    for p in (0.5, np.float32(0.5), torch.tensor(0.5)):
        dropouts = nn.Dropout(p), nn.Dropout(p).eval(), nn.Dropout(0.0)
        assert [*map(tensor_checks.has_dropout, dropouts)] == [True, False, False]


class ScaledHead(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, bias=False)
        self.scale = nn.Parameter(torch.ones(1))


@on_each_rank("world2")
def test_a_head_with_more_parameters_than_a_linear_layer_is_cut_as_one() -> None:
    model: Any = GPT.preset("tiny")
    head = ScaledHead(model.head.in_features, model.head.out_features)
    head.weight, model.head = model.head.weight, head
    tensor_parallel(model, Comm())
    assert model.head.weight is model.embed.tokens.weight
