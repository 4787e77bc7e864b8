"""Models that are no labkit.GPT, and what a user does beside training: what tensor and context
parallelism cannot get right is refused, the rest is as in one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit import GPT, Comm, RankError, World, context_parallel, sequence_shard, tensor_parallel


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


def test_a_look_at_one_projection_changes_nothing(world2: World) -> None:
    """q, k and v are computed together, when the first is asked for."""

    def run() -> tuple[bool, bool]:
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
        return has_gradient, torch.equal(attention(x), attention(x.clone()))

    assert world2.run(run) == [(True, True)] * 2


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
