"""ownership.py: different models, a module wrapped twice, later changes give clear errors."""

from typing import Any

import torch
from torch import nn

from labkit import Comm, dry_run
from labkit.parallel.common.ownership import ParamSnapshot, check_same_on_all_ranks, claim
from tables import cases, raises
from worlds import on_each_rank

CHANGES = {
    "shape": lambda module: setattr(module, "1", nn.Linear(4, 3)),
    "dtype": lambda module: module[1].double(),
    "frozen": lambda module: module[0].bias.requires_grad_(False),
    "missing": lambda module: module.pop(1),
    "order": lambda module: None,
}


@cases(
    ("shape", "1.weight [2, 4] float32 on rank 0 and 1.weight [3, 4] float32 on rank 1"),
    ("dtype", "1.weight [2, 4] float32 on rank 0 and 1.weight [2, 4] float64"),
    ("frozen", "0.bias [4] float32 on rank 0 and 0.bias [4] float32, frozen on rank 1"),
    ("missing", "1.weight [2, 4] float32 on rank 0 and missing on rank 1"),
    ("order", "parameter 0 is 0.weight [4, 3] float32 on rank 0 and 1.bias [2]"),
)
@on_each_rank("world3")
def test_every_rank_names_the_first_difference(kind: str, difference: str) -> None:
    comm = Comm()
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    check_same_on_all_ranks(list(module.named_parameters()), comm)
    if comm.rank == 1:
        CHANGES[kind](module)
    named = list(module.named_parameters())
    if comm.rank == 1 and kind == "order":
        named.reverse()
    message = str(raises((difference,), check_same_on_all_ranks, named, comm))
    assert set(comm.all_gather_object(message)) == {message}


def test_ranks_agree_on_paper_too() -> None:
    def work() -> None:
        module = nn.Linear(2, 2)
        check_same_on_all_ranks(list(module.named_parameters()), Comm())
        assert Comm().broadcast_object([2, 1]) == [2, 1]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    assert len(dry_run(work, ranks=4, step=0).ranks[0].comms) == 4


class Owner:
    pass


def test_a_parameter_has_one_living_owner() -> None:
    named = list(nn.Linear(2, 2).named_parameters())
    first = Owner()
    claim(named, first)
    claim(named, first)
    raises("Owner: weight already belongs to a Owner", claim, named, Owner())
    del first
    claim(named, Owner())


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@cases(
    (lambda module: module[1].bias.requires_grad_(False), "1.bias was frozen after"),
    (lambda module: module[0].requires_grad_(False), "0.weight was frozen after"),
    (lambda module: module.register_parameter("more", parameter(1)), "more was added"),
    (lambda module: module[1].register_module("more", nn.Linear(1, 1)), "1.more.weight was added"),
    (lambda module: setattr(module[0], "weight", parameter(2, 2)), "0.weight was replaced by"),
    (lambda module: setattr(module[0], "weight", None), "0.weight was removed"),
    (lambda module: module.pop(1), "1.weight was removed"),
)
def test_a_change_after_wrapping_is_named(change: Any, words: str) -> None:
    module = two_layers()
    same = ParamSnapshot(module)
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    same.check()
    change(module)
    raises((words,), same.check)


def test_a_change_that_is_undone_is_none_and_another_layer_is_always_seen() -> None:
    module = two_layers()
    same = ParamSnapshot(module)
    module[1].bias.requires_grad_(False)
    raises("1.bias was frozen", same.check)
    module[1].bias.requires_grad_(True)
    same.check()
    for _ in range(20):  # of which one may come to stand where the first one was in memory
        module[0] = nn.Linear(2, 2)
        raises(("0.weight was replaced by another tensor",), same.check)
