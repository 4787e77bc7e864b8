"""Models that are no labkit.GPT, and what a user does beside training: what tensor and context
parallelism cannot get right is refused, the rest is as in one process."""

import io
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit import (
    GPT,
    Comm,
    RankError,
    World,
    context_parallel,
    full_state_dict,
    listen,
    sequence_shard,
    tensor_parallel,
)
from labkit.parallel.common.shards import shard_of
from labkit.parallel.tensor import validation as tensor_checks
from labkit.parallel.tensor.vocab import vocab_parallel_cross_entropy
from labkit.recipes import held_bytes
from worlds import on_each_rank


class Mlp(nn.Module):
    """As GPT-2's: dropout stands behind `down`, where every rank has the whole sum."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))


def test_dropout_behind_the_rows_is_the_same_on_all_ranks(world4: World) -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        mlp, inside = Mlp(), []
        model = tensor_parallel(nn.Sequential(mlp), Comm())
        mlp.down.register_forward_pre_hook(lambda _, args: inside.append(args[0] != 0))
        out = model(torch.ones(3, 5, 8))
        return out.detach(), inside[0], torch.rand(2)

    (first, masks, after), *others = world4.run(run)
    for out, other_masks, then in others:
        assert torch.equal(out, first) and torch.equal(then, after)
        assert not torch.equal(other_masks, masks)


def test_an_error_in_a_layer_leaves_the_random_numbers_as_the_others_have_them(world2: World):
    def run() -> list[float]:
        torch.manual_seed(0)
        mlp = Mlp()
        model = tensor_parallel(nn.Sequential(mlp), Comm())
        mlp.drop.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
        with pytest.raises(KeyError):
            model(torch.ones(3, 5, 8))
        return torch.rand(3).tolist()

    one, other = world2.run(run)
    assert one == other


class Normed(nn.Module):
    """Attention's core behind a norm of queries and keys."""

    def __init__(self, core: nn.Module, width: int) -> None:
        super().__init__()
        self.core, self.norm = core, nn.LayerNorm(width)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.core(self.norm(q), self.norm(k), v)


def test_a_parameter_inside_a_cut_layer_is_refused(world2: World) -> None:
    def run() -> None:
        model: Any = GPT.preset("tiny")
        model.blocks[0].attn.core = Normed(model.blocks[0].attn.core, 3)
        tensor_parallel(model, Comm())

    with pytest.raises(RankError, match=r"blocks\.0\.attn\.core\.norm\.weight is a parameter"):
        world2.run(run)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT.preset("tiny").double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)


def test_what_is_tied_stays_tied_inside_another_module(world2: World) -> None:
    tokens = torch.arange(32).view(2, 16)

    def gradient(cut: bool) -> Tensor:
        torch.manual_seed(0)
        model: Any = Around()
        if cut:
            tensor_parallel(model, Comm())
            assert model.gpt.head.weight is model.gpt.embed.tokens.weight
        model(tokens).square().mean().backward()
        return model.gpt.embed.tokens.weight.grad

    def parts() -> Tensor:
        return gradient(cut=True)

    right = gradient(cut=False)
    assert torch.allclose(torch.cat(world2.run(parts)), right, rtol=0, atol=1e-12)


def test_what_would_not_stay_tied_is_refused(world2: World) -> None:
    def run() -> None:
        model: Any = GPT.preset("tiny")
        model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight
        tensor_parallel(model, Comm())

    with pytest.raises(RankError, match="were one parameter and would be cut into several"):
        world2.run(run)


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
    def forward(  # type: ignore[override]
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        return F.cross_entropy(super().forward(tokens, positions).flatten(0, 1), targets.flatten())


def test_positions_are_filled_in_wherever_they_stand(world2: World) -> None:
    tokens = torch.arange(32).view(2, 16)

    def fresh() -> WithTargets:
        torch.manual_seed(0)
        return WithTargets.preset("tiny").double()  # type: ignore[return-value]

    def run() -> float:
        comm = Comm()
        model, mine = context_parallel(fresh(), comm), sequence_shard(tokens, comm)
        value = model(mine, mine).detach()
        comm.all_reduce(value, "mean")
        return value.item()

    right = fresh()(tokens, tokens).item()
    assert world2.run(run) == [pytest.approx(right, abs=1e-12)] * 2


# ---- a gated MLP


class Gated(nn.Module):
    """As Llama's."""

    def __init__(self, width: int = 8, hidden: int = 24, gate: int | None = None) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, gate or hidden), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def gated_gpt() -> Any:
    torch.manual_seed(0)
    model: Any = GPT(31, 24, 2, 6, 16)
    for block in model.blocks:
        block.mlp = Gated(24, 36)
    return model.double()


@pytest.mark.parametrize("size", [2, 3])
def test_a_gated_mlp_is_cut_by_columns_and_rows(world2: World, world3: World, size: int) -> None:
    """Weights as of one process; up and gate get one x: a layer still sends four all-reduces."""

    def run(sequence: bool) -> tuple[float, int, tuple[int, ...]]:
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
        found = full_state_dict(model)
        off = max(float((found[n] - x).abs().max()) for n, x in alone.state_dict().items())
        x_bytes = 2 * 12 * 24 * 8
        summed = [e for e in events if e.op == "all_reduce" and e.payload_bytes == x_bytes]
        return off, len(summed), tuple(model.blocks[0].mlp.gate.weight.shape)

    world = world2 if size == 2 else world3
    for off, summed, gate in world.run(run, False):
        assert off < 1e-10 and gate == (36 // size, 24)
        assert summed == 2 * 4 + 2, "four a layer, and of the embedding and the head's input"
    for off, _, _ in world.run(run, True):
        assert off < 1e-10


@on_each_rank("world2")
def test_the_predicted_bytes_of_a_gated_model_are_what_is_held() -> None:
    plain, comm = gated_gpt(), Comm()
    predicted = sum(held_bytes(plain, comm.size).values())
    held = sum(p.nbytes for p in tensor_parallel(plain, comm).parameters())
    assert predicted == held


def test_an_invalid_gate_is_refused_by_name(world2: World) -> None:
    for mlp, words in (
        (Gated(gate=1), r"0\.gate has 1 features and up 24.*give it another name"),
        (Gated(hidden=9), r"9 hidden features of 0 do not divide over 2"),
    ):
        with pytest.raises(RankError, match=words):
            world2.run(lambda mlp=mlp: tensor_parallel(nn.Sequential(mlp), Comm()))


# ---- what the ranks compare


class Nested(nn.Module):
    """Takes its input as some models do, in a dict of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.drop = Gated(), nn.Dropout(0.0)

    def forward(self, batch: Any, *, more: Any = None) -> Tensor:
        return self.drop(self.mlp(batch["x"][0]))


def test_an_input_inside_a_container_is_compared(world2: World) -> None:
    def run(where: str) -> None:
        model = tensor_parallel(Nested(), Comm())
        same, other = torch.ones(2, 3, 8), torch.full((2, 3, 8), Comm().rank)
        batch = {"x": [other if where == "in a list" else same]}
        model(batch, more=(other,) if where == "by name" else None)

    for where in ("in a list", "by name"):
        with pytest.raises(RankError, match="the input differs between the ranks"):
            world2.run(run, where)
    world2.run(run, "nowhere")


def test_targets_that_differ_are_found(world2: World) -> None:
    def run() -> None:
        vocab_parallel_cross_entropy(torch.ones(2, 3), torch.tensor([0, Comm().rank]), Comm())

    with pytest.raises(RankError, match="the tensor of targets differs(.|\n)*the same batch"):
        world2.run(run)


class Elsewhere:
    """As much of a generator as is asked for, of a device that a test may not have."""

    def __init__(self, device: str, state: int) -> None:
        self.device, self.state = torch.device(device), torch.tensor([state])

    def get_state(self) -> Tensor:
        return self.state


def test_random_states_of_the_models_device_are_compared(world2: World) -> None:
    """The generator of a GPU that this model is not on is another's affair."""

    def run(device: str) -> None:
        here = [torch.default_generator, Elsewhere(device, Comm().rank)]
        with patch.object(tensor_checks, "generators", lambda: here):
            tensor_checks.SameInput(Comm(), False)(Mlp().to("meta"), (), {})

    with pytest.raises(RankError, match="the random state differs(.|\n)*the same seed"):
        world2.run(run, "meta")
    world2.run(run, "cuda:1")


# ---- a model that leaves its ranks


def test_a_model_that_was_pickled_says_that_its_ranks_are_gone(world2: World) -> None:
    def run(way: str) -> Any:
        torch.manual_seed(0)
        model = GPT(31, 24, 1, 4, 16)
        if way == "tensor":
            return tensor_parallel(model, Comm())
        return context_parallel(model, Comm(), way=way)  # type: ignore[arg-type]

    tokens = torch.zeros(1, 8, dtype=torch.long)
    for way in ("tensor", "ring", "ulysses"):
        models = world2.run(run, way)
        torch.save(models[1], file := io.BytesIO())
        file.seek(0)
        for model in (models[1], torch.load(file, weights_only=False)):
            with pytest.raises(RuntimeError, match=r"rank 1 over ranks \[0, 1\] was pickled"):
                model(tokens)
            marks = [shard_of(p) for p in model.parameters()]
            assert any(marks) == (way == "tensor")
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
