"""The conjugate operators: values and gradients, what each sends, and that they are transposes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit import Comm, World, listen
from labkit.parallel.common import conjugate
from tables import cases, raises
from worlds import on_each_rank

OPERATORS: dict[str, Callable[[Tensor, Comm], Tensor]] = {
    "copy": conjugate.copy_to_ranks,
    "reduce": conjugate.reduce_from_ranks,
    "gather": lambda x, comm: conjugate.gather_from_ranks(x, comm, dim=1),
    "scatter": lambda x, comm: conjugate.scatter_to_ranks(x, comm, dim=1),
    "all_gather": conjugate.all_gather_sequence,
    "reduce_scatter": conjugate.reduce_scatter_sequence,
}


def of_rank(rank: int, length: int) -> Tensor:
    """[2, length, 5] whole numbers, others on each rank."""
    torch.manual_seed(rank)
    return torch.randint(-9, 9, (2, length, 5)).double()


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


EXPECTED: dict[str, Callable[[list[Tensor], int], Tensor]] = {
    "same": lambda given, rank: given[rank],
    "sum": lambda given, rank: sum_of(given),
    "beside": lambda given, rank: torch.cat(given, 1),
    "part": lambda given, rank: given[rank].chunk(3, 1)[rank],
    "part of sum": lambda given, rank: sum_of(given).chunk(3, 1)[rank],
}


@cases(
    ("copy", "same", "sum", [("all_reduce", True)]),
    ("reduce", "sum", "same", [("all_reduce", False)]),
    ("gather", "beside", "part", [("all_gather", False)]),
    ("scatter", "part", "beside", [("all_gather", True)]),
    ("all_gather", "beside", "part of sum", [("all_gather", False), ("reduce_scatter", True)]),
    ("reduce_scatter", "part of sum", "beside", [("reduce_scatter", False),
                                                 ("all_gather", True)]),
)  # fmt: skip
@on_each_rank("world3")
def test_values_gradients_and_events(name: str, forward: str, backward: str, sent: Any) -> None:
    """`sent`: each operation, and whether it was in backward."""
    comm = Comm()

    def inputs(what: str, first: int) -> list[Tensor]:
        return [of_rank(first + rank, 4 if what == "beside" else 12) for rank in range(3)]

    x = inputs(forward, 0)[comm.rank].requires_grad_()
    with listen() as events:
        y = OPERATORS[name](x, comm)
        found = [(event.op, False) for event in events]
        y.backward(inputs(backward, 10)[comm.rank])
    assert found + [(event.op, True) for event in events[len(found) :]] == sent
    assert x.grad is not None and y.is_contiguous() and x.grad.is_contiguous()
    assert torch.equal(y, EXPECTED[forward](inputs(forward, 0), comm.rank))
    assert torch.equal(x.grad, EXPECTED[backward](inputs(backward, 10), comm.rank))


@on_each_rank("world3")
def test_a_slanted_tensor_and_16_bits() -> None:
    """Not contiguous, expanded gradients, other dims; small whole numbers are exact in bf16."""
    comm = Comm()
    for dtype in (torch.float64, torch.bfloat16):
        x = of_rank(comm.rank, 6).to(dtype).transpose(0, 2).requires_grad_()  # [5, 6, 2]
        everyone = [of_rank(rank, 6).to(dtype).transpose(0, 2) for rank in range(3)]
        for y, expected in (
            (conjugate.reduce_from_ranks(x, comm), sum_of(everyone)),
            (conjugate.gather_from_ranks(x, comm, dim=-1), torch.cat(everyone, -1)),
            (OPERATORS["reduce_scatter"](x, comm), sum_of(everyone).chunk(3, 1)[comm.rank]),
        ):
            assert y.dtype == dtype and torch.equal(y, expected)
            x.grad = None
            y.sum().backward()  # its gradient is one number, expanded
            assert x.grad is not None and x.grad.eq(1).all()


@on_each_rank("world3")
def test_several_copies_travel_together() -> None:
    xs = [torch.ones(3, 2).requires_grad_(), torch.ones(5), torch.ones(7).requires_grad_()]
    with listen() as events:
        copies = conjugate.copies_to_ranks(xs, Comm())
        assert not copies[1].requires_grad
        sum((copy * 2).sum() for copy in copies).backward()
    for x in xs[::2]:
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.eq(6).all()
    assert sum(event.payload_bytes for event in events) == 4 * (6 + 7)


@on_each_rank("world3")
def test_nothing_is_sent_for_what_needs_no_gradient() -> None:
    with listen() as events:
        weight = torch.ones(3, requires_grad=True)
        (conjugate.copy_to_ranks(torch.ones(3), Comm()) * weight).sum().backward()
    assert len(events) == 0


def test_one_rank_does_nothing() -> None:
    def run() -> bool:
        x = torch.ones(2, 3, 5, requires_grad=True)
        return all(operator(x, Comm()) is x for operator in OPERATORS.values())

    with World(1) as one:
        assert one.run(run) == [True]


@pytest.mark.parametrize("name", ["scatter", "reduce_scatter"])
@on_each_rank("world3")
def test_a_length_that_does_not_divide(name: str) -> None:
    words = "has size 10, which cannot be split evenly over 3 ranks.*9 or 12"
    raises(words, OPERATORS[name], torch.ones(2, 10, 5), Comm())


@on_each_rank("world3")
def test_a_gradient_of_a_gradient_is_refused() -> None:
    """It would have to send, and does not: an error, not a wrong number."""
    x = torch.ones(3, requires_grad=True)
    y = conjugate.copy_to_ranks(x, Comm()).pow(2).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    raises("once_differentiable", g.sum().backward, error=RuntimeError)
